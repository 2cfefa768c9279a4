"""Generated programs: whatever is drawn, the sharded program is the program, or is left as it was for a reason.

A failure prints the smallest program found that fails in the same way; `draw(seed, most)` makes the same one again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ringopt.errors import OptionError
from ringopt.ops import collectives
from tests.generated.drawing import INVALID, Program, draw
from tests.harness.translation import validate_function, values_and_gradients

CASES = [(2, "contiguous"), (2, "zigzag"), (3, "auto"), (2, "auto"), (3, "contiguous"), (2, "zigzag")]


def verdict(program: Program, p: int, layout: str) -> str:
    """exact, gathered, refused, unsharded: all right. "invalid": eager itself fails, or finds no finite numbers. Else
    what went wrong."""
    try:
        inputs = program.inputs()
        found = values_and_gradients(program, inputs)
    except INVALID:
        return "invalid"
    if not all(value is None or value.isfinite().all() for part in found for value in part):
        return "invalid"
    try:
        result = validate_function(p, program, inputs, layout=layout)
    except OptionError:  # a sequence too short for zigzag
        result = validate_function(p, program, inputs)
    except Exception as error:  # any other is what the test is for
        return f"crash: {type(error).__name__}: {error}"
    if result.wrong:
        return f"wrong: {result.wrong}"
    report = result.report
    if report.refusal or not any(site.refusal is None for site in report.sites):
        return "refused" if report.refusal else "unsharded"
    return "gathered" if any(gather.op != "output" for gather in report.gathers) else "exact"


def failed(said: str) -> bool:
    return said.startswith(("wrong", "crash"))


def shrunk(program: Program, p: int, layout: str, kind: str) -> Program:
    """The smallest program found, by leaving out what can be left out, that fails as `kind` does."""
    for candidate in program.smaller():
        if verdict(candidate, p, layout).startswith(kind):
            return shrunk(candidate, p, layout, kind)
    return program


def check(first: int, count: int, most: int, draw: Callable[[int, int], Program] = draw) -> Counter[str]:
    """What came of so many programs, from seed `first` on."""
    found: Counter[str] = Counter()
    seed = first
    while sum(found.values()) - found["invalid"] < count:
        program, (p, layout) = draw(seed, most), CASES[seed % len(CASES)]
        said = verdict(program, p, layout)
        if failed(said):
            small = shrunk(program, p, layout, said[:5])
            pytest.fail(f"seed {seed}, {most} steps, {p} ranks, {layout}: {verdict(small, p, layout)}\n{small}")
        found[said] += 1
        seed += 1
    return found


TENS = range(0, 1000, 10)


@pytest.mark.parametrize("first", [pytest.param(first, marks=[pytest.mark.zoo] if first else []) for first in TENS])
def test_a_thousand_programs(first):
    """Ten of them; with -m zoo the others."""
    found = check(first, 10, most=2)
    assert found["exact"] > 3, found


@pytest.mark.zoo
@pytest.mark.parametrize("first", range(100_000, 200_000, 2_000))
def test_ten_thousand_longer_programs(first):
    check(first, 200, most=6)


def test_a_planted_fault_is_found(monkeypatch):
    """A gradient that is not summed over the ranks: the values are right, and every gradient beside sharded values is a
    part of what it should be."""
    monkeypatch.setattr(collectives._CopyToGroup, "backward", staticmethod(lambda ctx, grad: (grad, None)))
    program = Program(("h, = heads(x, 1); x = merge(sdpa(h, h, h))",), ("logits.square().mean()", "loss,"))
    assert verdict(program, 2, "contiguous").startswith("wrong: rank 0: gradient")


def test_a_failure_shrinks(monkeypatch):
    """To the attention, and the one line that takes part."""
    monkeypatch.setattr(collectives._CopyToGroup, "backward", staticmethod(lambda ctx, grad: (grad, None)))
    lines = ("x = x.sin()", "h, = heads(x, 1); x = merge(sdpa(h, h, h))", "x = x * p()", "x = x[:, 1:]")
    program = Program(lines, ("logits[:, 0].sum()", "loss, logits"))
    assert shrunk(program, 2, "contiguous", "wrong").lines == lines[1:2]
