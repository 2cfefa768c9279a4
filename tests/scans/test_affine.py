"""The proof that a step is affine: maps of runs of steps that compose to the whole; look-alikes are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringopt.ir.refusal import Refusal
from ringopt.scans.affine import AffineStep, prove_affine
from ringopt.scans.segment_map import Frame
from ringopt.scans.trace import kinds_of
from tests.scans.bodies import Scan, delta_rule, diagonal, drawn, gates, stabilised


def proved(scan: Scan) -> AffineStep:
    found = prove_affine(scan.text, kinds_of(scan.init, scan.xs, scan.consts))
    assert isinstance(found, AffineStep), found
    return found


def one(step: Callable[..., Any], *sizes: int, consts: Any = (), x: Any = None) -> Scan:
    """Of one carry of such sizes, and a gate and an addend like it."""
    return Scan(step, [drawn(*sizes)], [gates(6, *sizes), drawn(6, *(x or sizes), seed=1)], list(consts))


def vector_decay() -> Scan:
    """Kimi: every key dim has a decay of its own."""
    step = lambda s, g, k, v: (s * g[..., None] + k[..., None] * (v - k[..., None, :] @ s),)  # noqa: E731
    return Scan(step, [drawn(2, 4, 5)], [gates(6, 2, 4), drawn(6, 2, 4, scale=0.3), drawn(6, 2, 1, 5)], [])


def summed() -> Scan:
    """A product spelled as a sum, in another order of dims, with a reset by `where`."""

    def step(s: Any, k: Any, v: Any, keep: Any) -> Any:
        s = torch.where(keep > 0, s, 0.0)
        return s + (v - (s * k[:, None, :]).sum(-1))[:, :, None] * k[:, None, :], s.sum((1, 2))

    return Scan(step, [drawn(2, 5, 4)], [drawn(6, 2, 4, scale=0.4), drawn(6, 2, 5), gates(6, 1, 1, 1)], [])


AFFINE = {
    "delta rule": (lambda: delta_rule(6), ["point point mixed free"]),
    "diagonal": (lambda: diagonal(6), ["point point"]),
    "stabilised": (lambda: stabilised(6), ["max-plus free point", "point point", "point point"]),
    "vector decay": (vector_decay, ["point mixed free"]),
    "summed": (summed, ["point free mixed"]),
    "a decay of all": (lambda: one(lambda s, a, x: (0.9 * s + x - s / 7,), 3, 4), ["free free"]),
    "rows of a matrix": (
        lambda: one(lambda s, a, x, w: ((s @ w).neg() + x,), 3, 4, consts=[drawn(4, 4, scale=0.4)]),
        ["free mixed"],
    ),
    "more mixed than free": (
        lambda: one(lambda s, a, x, w: (a * (w @ s) + x,), 5, 2, consts=[drawn(5, 5, scale=0.4)]), ["mixed point"],
    ),
    "transposed": (lambda: one(lambda s, a, x: (s.mT * 0.9 + x,), 3, 3), ["mixed mixed"]),
    "the token before": (lambda: one(lambda s, a, x: (x + 0, s * a), 3, 4), ["free free"]),
    "kept": (lambda: one(lambda s, a, x: (s + 0, s * x), 3, 4), ["free free"]),
    "einsum": (
        lambda: one(lambda s, a, x, w: (torch.einsum("bij,jk->bik", s, w) * a + x,), 2, 3, 4, consts=[drawn(4, 4)]),
        ["point point mixed"],
    ),
    "views": (
        lambda: one(lambda s, a, x: ((s.reshape(3, 4).mT.reshape(4, 3).mT * x.view(3, 4)).reshape(12),), 12), ["mixed"],
    ),
    "addmm": (
        lambda: one(lambda s, a, x, w: (torch.addmm(x, s, w, beta=2, alpha=0.5),), 3, 4, consts=[drawn(4, 4) * 0.4]),
        ["free mixed"],
    ),
    "linear": (
        lambda: one(lambda s, a, x, w: (torch.nn.functional.linear(s, w, x[0]),), 3, 4, consts=[drawn(4, 4) * 0.4]),
        ["free mixed"],
    ),
    "less what it takes": (
        lambda: one(lambda s, a, x: (torch.rsub(s, x, alpha=0.5) - torch.sub(x, s, alpha=1.25),), 3), ["free"],
    ),
    "stacked": (lambda: one(lambda s, a, x: (torch.stack([s[:, 0] * 0.9, x[:, 1]], -1),), 3, 2), ["point mixed"]),
    "joined": (lambda: one(lambda s, a, x: (torch.cat([s[:, :2] * 0.9, x[:, :2]], 1),), 3, 4), ["point mixed"]),
    "masked": (lambda: one(lambda s, a, x: ((s * a).masked_fill(x > 1, 2.0) + x,), 3), ["point"]),
}  # fmt: skip


@pytest.mark.parametrize("name", AFFINE)
def test_maps_of_runs_compose_to_the_scan(name):
    make, axes = AFFINE[name]
    scan = make()
    affine = proved(scan)
    stages = sorted((stage for level in affine.levels for stage in level), key=lambda stage: stage.place)
    forms = [f"{stage.form} " * (stage.form == "max-plus") + " ".join(stage.axes) for stage in stages]
    assert forms == axes
    expected = scan.loop()
    for stage in stages:
        frame = Frame(stage)
        state, moved = frame.inward(scan.init[stage.place]), scan.init
        for first, last in ((0, 2), (2, 2), (2, 6)):
            earlier = [moved[place] for place in stage.earlier]
            xs = [x[first:last] for x in scan.xs]
            of = frame.of_steps(earlier, xs, scan.consts)
            forgotten, state = frame.apply(of, torch.zeros_like(state)), frame.apply(of, state)
            moved = Scan(scan.step, list(moved), xs, scan.consts).loop()[: len(moved)] if first < last else moved
        torch.testing.assert_close(frame.outward(state), expected[stage.place], rtol=1e-12, atol=1e-12)
        assert name == "the token before" or (state - forgotten).abs().max() > 1e-3


LOOK_ALIKES = {
    "tanh": (lambda s, a, x: (torch.tanh(s * a + x),), "tanh of what a step carries"),
    "relu": (lambda s, a, x: (torch.relu(s * a + x),), "relu of what a step carries"),
    "square": (lambda s, a, x: (s @ s + x,), "matmul|mm of two operands that both hold"),
    "a gate that reads the state": (lambda s, a, x: (s * torch.sigmoid(s) + x,), "sigmoid of what a step carries"),
    "a product with itself": (lambda s, a, x: (s * s.mT + x,), "mul of two operands that both hold"),
    "a quotient": (lambda s, a, x: (x / s,), "a division that is not by a number"),
    "a norm": (lambda s, a, x: (s / s.norm(),), "norm of what a step carries"),
    "a choice": (lambda s, a, x: (torch.where(s > 0, s, x),), "of what a step carries"),
    "rounded": (lambda s, a, x: (s.to(torch.int64).double() + x,), "a cast to torch.int64"),
    "rounded down": (lambda s, a, x: (torch.div(s, 3, rounding_mode="floor"),), "a division that is not"),
    "a maximum of a product": (lambda s, a, x: (torch.maximum(s * a, x),), "maximum of what a step carries"),
    "a maximum of two": (lambda s, a, x: (torch.maximum(s + s, x),), "maximum of what a step carries"),
    "a maximum elsewhere": (lambda s, a, x: (torch.maximum(s.mT, x),), "maximum of what a step carries|other places"),
    "sorted": (lambda s, a, x: (s.sort(0)[0] + x,), "sort of what a step carries"),
    "of the kind of the state": (lambda s, a, x: (x.type_as(s) * torch.ones_like(s) * s.exp(),), "exp of what"),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_refused(name):
    step, why = LOOK_ALIKES[name]
    scan = one(step, 3, 3)
    found = prove_affine(scan.text, kinds_of(scan.init, scan.xs, scan.consts))
    assert isinstance(found, Refusal)
    assert re.search(why, found.sentence), found.sentence


def test_carries_that_need_each_other_are_refused():
    scan = Scan(lambda s, t, x: (s * x + t, t + 0.5 * s), [drawn(3), drawn(3, seed=1)], [drawn(4, 3)], [])
    found = prove_affine(scan.text, kinds_of(scan.init, scan.xs, scan.consts))
    assert isinstance(found, Refusal) and "carries 0, 1 need each other" in found.sentence


def test_what_only_takes_its_kind_from_the_state_is_no_part_of_it():
    scan = one(lambda s, a, x: (s * a + x.type_as(s) + torch.ones_like(s),), 3, 3)
    frame = Frame(proved(scan).levels[0][0])
    of = frame.of_steps([], [x.detach() for x in scan.xs], [])
    torch.testing.assert_close(frame.outward(frame.apply(of, frame.inward(scan.init[0]))), scan.loop()[0])


def test_a_carry_that_counts_is_refused():
    scan = Scan(lambda s, x: (s + 1, x * s), [torch.zeros(3, dtype=torch.int64)], [drawn(4, 3)], [])
    found = prove_affine(scan.text, kinds_of(scan.init, scan.xs, scan.consts))
    assert isinstance(found, Refusal) and "carry 0 is torch.int64" in found.sentence
