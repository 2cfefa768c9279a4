"""Generated programs with branches that data decide: values, what was written, and gradients are those of eager,
whatever was predicated, selected, or left to a graph break."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.frontend.data_sizes.assertions import Asserted, take_assertions
from ringopt.frontend.data_sizes.gradients import gradients_where_taken, take_conditions
from ringopt.frontend.data_sizes.traced_again import trace_with_sizes, traces_sizes

STATEMENTS = (
    "a = a * b", "a = b", "a = a - a.mean()", "a = a.clone()", "a = a.abs().sqrt()", "a = a.softmax(-1)", "a = a * n",
    "a = a.view(-1).view(3, 4)", "b = b.masked_fill(m, 1.0)", "b = b[:, :]", "b = (b * w).tanh()", "b = b / m.sum()",
    "b = b @ b.t() @ b", "c = torch.where(m, a, b)", "c = c / a.abs().sum()", "c = c.log()", "c = c.float().double()",
    "a, b = b, a", "c = b", "n = 2.0", "a.add_(1)", "b[m] = 0.0", "b.masked_fill_(m, 3.0)",
    "c = c.masked_fill_(m, 2.0)",
)  # fmt: skip
CONDITIONS = (
    "m.any()", "m.any().item()", "m.sum().item()", "not m.all()", "(a > 1).any()", "a.sum() > 0", "(b < c).all()",
    "torch.isnan(c).any()",
)  # fmt: skip
RESULTS = ("a", "b", "a * b + c", "(a, b)", "(a.sum(), c, b[0])", "(x, a)", "(c, c)")
SCALES, FIRSTS = (1.0, 0.2, 2.0, 1.0, -1.0), range(0, 600, 12)


def block(dice: random.Random, depth: int) -> list[str]:
    lines: list[str] = []
    for _ in range(dice.randint(1, 3)):
        if depth < 2 and dice.random() < 0.4:
            lines += [f"if {dice.choice(CONDITIONS)}:", *("    " + line for line in block(dice, depth + 1))]
        else:
            lines.append(dice.choice(STATEMENTS))
    return lines


def drawn(seed: int) -> tuple[str, Callable[..., Any]]:
    """The text of a program of x, w [3, 4] and a mask m, and the program."""
    dice = random.Random(seed)
    body = [*block(dice, 0), f"if {dice.choice(CONDITIONS)}:", *("    " + line for line in block(dice, 1))]
    begin = "n = 1.0; a = x * 2; b = x + w; c = w.sin()"
    text = "\n    ".join(["def program(x, w, m):", begin, *body, f"return {dice.choice(RESULTS)}"]) + "\n"
    name, found = f"<branches {seed}>", dict[str, Any](torch=torch)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), found)
    return text, found["program"]


def outcome(run: Callable[..., Any], seed: int, call: int) -> list[Tensor]:
    """What it returns, what its first input holds then, and the gradients, zeros where there is none."""
    numbers = torch.Generator().manual_seed(10 * seed + call)
    x, w = (torch.randn(3, 4, generator=numbers, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.full((3, 4), call == 4)
    mask[1, 2] |= call % 2 == 1
    given = x * SCALES[call]
    returned = run(given, w, mask)
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    weighed = [(y * torch.linspace(0.5, 1.5, y.numel()).view(y.shape).to(y)).sum() for y in (*outputs, given)]
    gradients = torch.autograd.grad(torch.stack(weighed).sum(), [x, w], materialize_grads=True)
    return [*(y.detach() for y in (*outputs, given)), *gradients]


@traces_sizes(lambda: True)
def backend(gm: Any, inputs: Any) -> Any:
    asserted = take_assertions(gm)
    conditions = take_conditions(gm, trace_with_sizes(gm, 2))
    run = gradients_where_taken(torch._dynamo.lookup_backend("aot_eager")(gm, inputs), conditions)
    return Asserted(run, asserted) if asserted else run


def compared(program: Callable[..., Any], made_by: Any, seed: int) -> tuple[int, bool]:
    """How many calls could be compared, and whether all were those of eager."""
    torch._dynamo.reset()
    run, calls = torch.compile(program, backend=made_by), 0
    for call in range(len(SCALES)):
        try:
            expected, found = outcome(program, seed, call), outcome(run, seed, call)
        except RuntimeError as problem:  # of what is written after it was saved, in a way that is not taken here
            assert "modified by an inplace operation" in str(problem)
            continue
        calls += 1
        for one, other in zip(expected, found, strict=True):
            if one.dtype != other.dtype or not torch.allclose(one, other, 1e-9, 1e-10, equal_nan=True):
                return calls, False
    return calls, True


def is_eagers(seed: int) -> bool:
    """Whether a program could be compared; not where torch.compile is wrong itself (of memory that is written and
    returned). Raises AssertionError where it differs."""
    text, program = drawn(seed)
    calls, right = compared(program, backend, seed)
    if not right and not compared(program, "aot_eager", seed)[1]:
        return False
    assert right, text
    return calls > 0


@pytest.mark.parametrize("first", [pytest.param(first, marks=[pytest.mark.zoo] if first else []) for first in FIRSTS])
def test_branches_are_those_of_eager(first: int) -> None:
    teach_dynamo()
    assert sum(is_eagers(seed) for seed in range(first, first + 12)) > 6
