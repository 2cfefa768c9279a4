"""`ringopt.scan`: a recurrence by hand equals the loop, on one device and over ranks as threads, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringopt
from ringopt.errors import OptionError, RingMismatchError
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.scans.bodies import drawn, gates

STEPS = 7


def step(carry: Any, x: Any, w: Tensor) -> Any:
    """A state and what was there before; two ys."""
    state, before = carry
    key, value, gate = x
    new = gate[..., None] * state + key.mT @ value
    return (new, new * 0.5 + before), (key @ (new @ w), before.sum(-1))


def operands() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Carries, xs and a weight."""
    xs = [drawn(STEPS, 2, 3, 4), drawn(STEPS, 2, 3, 4, seed=1), gates(STEPS, 2, 4)]
    return [drawn(2, 4, 4), drawn(2, 4, 4, seed=1)], xs, drawn(4, 4)


def loop(init: list[Tensor], xs: list[Tensor], w: Tensor) -> list[Tensor]:
    carry, rows = tuple(init), []
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        carry, ys = step(carry, row, w)
        rows.append(ys)
    return [*carry, *(torch.stack(ys) for ys in zip(*rows, strict=True))]


def outcome(found: list[Tensor], learned: list[Tensor]) -> list[Tensor]:
    """Results, and gradients of a sum that weighs each entry."""
    total = sum((x * torch.arange(1.0, x.numel() + 1).view_as(x).cos()).sum() for x in found)
    return [*(x.detach() for x in found), *torch.autograd.grad(total, learned)]


@pytest.mark.parametrize(("p", "layout"), [(1, "contiguous"), (2, "zigzag"), (3, "contiguous"), (4, "zigzag")])
def test_it_is_the_loop(p: int, layout: str) -> None:
    init, xs, w = operands()
    wanted = outcome(loop(init, xs, w), [*init, *xs, w])

    def body(mesh: ThreadMesh) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (*init, *xs, w)]
        where: Any = {"mesh": mesh, "layout": layout}
        rows = [ringopt.shard(x, 0, **where) for x in leaves[2:5]]
        last, ys = ringopt.scan(step, leaves[:2], rows, [leaves[5]], **where)
        whole = [ringopt.unshard(y, 0, length=STEPS, **where) for y in ys]
        return outcome([*last, *whole], leaves)

    for found in run_on_threads(p, body):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_one_tensor_of_each() -> None:
    """Without a process group; a step that is not affine is as good there."""
    a, x = drawn(3), drawn(STEPS, 3)
    last, ys = ringopt.scan(lambda s, x: ((s * x).tanh(), s), a, x)
    state, rows = a, []
    for row in x.unbind(0):
        rows.append(state)
        state = (state * row).tanh()
    torch.testing.assert_close([last, ys], [state, torch.stack(rows)])


@pytest.mark.parametrize("p", [1, 2, 3])
def test_complex_numbers(p: int) -> None:
    """A linear recurrent unit (Orvieto et al. 2023): gradients too are complex where the operands are."""
    init, rate = drawn(3) + 1j * drawn(3, seed=1), torch.polar(gates(3), drawn(3))
    xs, c = drawn(STEPS, 3) * (1 + 0.5j), drawn(2, 3) + 1j * drawn(2, 3, seed=2)
    leaves = [x.detach().requires_grad_() for x in (init, xs, rate, c)]

    def turned(s: Tensor, x: Tensor, rate: Tensor, c: Tensor) -> Any:
        new = rate * s + x
        return new, ((c @ new).real, new.conj())

    state, rows = leaves[0], []
    for row in leaves[1].unbind(0):
        state, ys = turned(state, row, *leaves[2:])
        rows.append(ys)
    wanted = outcome(pairs([state, *(torch.stack(ys) for ys in zip(*rows, strict=True))]), leaves)

    def body(mesh: ThreadMesh) -> list[Tensor]:
        own = [x.detach().clone().requires_grad_() for x in leaves]
        last, ys = ringopt.scan(turned, own[0], ringopt.shard(own[1], 0, mesh=mesh), own[2:], mesh=mesh)
        return outcome(pairs([last, *(ringopt.unshard(y, 0, length=STEPS, mesh=mesh) for y in ys)]), own)

    for found in run_on_threads(p, body):
        torch.testing.assert_close(pairs(found), pairs(wanted), rtol=1e-11, atol=1e-11)


def pairs(found: list[Tensor]) -> list[Tensor]:
    """Complex numbers as their parts."""
    return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]


@pytest.mark.parametrize(("p", "layout"), [(2, "zigzag"), (3, "contiguous")])
def test_a_step_that_is_not_affine_runs_on_one_rank_after_the_other(p: int, layout: str) -> None:
    def cell(s: Tensor, x: Tensor, w: Tensor) -> Any:
        new = (s @ w + x).tanh()
        return new, new * x

    init, x, w = drawn(3), drawn(STEPS, 3), drawn(3, 3)
    state, rows = init, []
    for row in x.unbind(0):
        state, y = cell(state, row, w)
        rows.append(y)
    wanted = outcome([state, torch.stack(rows)], [init, x, w])

    def body(mesh: ThreadMesh) -> list[Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in (init, x, w)]
        where: Any = {"mesh": mesh, "layout": layout}
        last, ys = ringopt.scan(cell, leaves[0], ringopt.shard(leaves[1], 0, **where), [leaves[2]], **where)
        return outcome([last, ringopt.unshard(ys, 0, length=STEPS, **where)], leaves)

    for found in run_on_threads(p, body):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    with pytest.raises(OptionError, match="a carry is of floating numbers, and init is of int64"):
        run_on_threads(p, lambda mesh: ringopt.scan(lambda s, x: (s * s, x), torch.tensor([1]), x.detach(), mesh=mesh))


OUTSIDE = torch.ones(3, dtype=torch.float64)
REFUSED = {
    "from outside of the step are `consts`": lambda s, x: (s * OUTSIDE + x, s),
    "random numbers": lambda s, x: (s + torch.rand_like(x), s),
    "the step cannot be traced": lambda s, x: (s if x.sum() > 0 else -s, s),
    "given 1 carries and returns 2": lambda s, x: ((s, x), s),
    "abs of complex numbers": lambda s, x: (s + x, torch.complex(s, x).abs()),
    r"carry 0 is \[3\] float64 before a step and \[3\] float32": lambda s, x: ((s + x).float(), s),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_step_that_is_none_is_refused(why: str) -> None:
    def body(mesh: ThreadMesh) -> Any:
        x = ringopt.shard(drawn(STEPS, 3).detach(), 0, mesh=mesh)
        return ringopt.scan(REFUSED[why], drawn(3).detach(), x, mesh=mesh)

    with pytest.raises(OptionError, match=why):
        run_on_threads(2, body)


def test_rows_that_are_no_sequence_and_gradients_of_some_ranks_are_errors_on_all() -> None:
    def added(s: Tensor, x: Tensor) -> Any:
        return s + x, s

    def cut(mesh: ThreadMesh) -> Any:
        return ringopt.scan(added, drawn(3).detach(), drawn(4 + mesh.rank * 3, 3).detach(), mesh=mesh)

    def learned(mesh: ThreadMesh) -> Any:
        return ringopt.scan(added, drawn(3).detach(), drawn(4, 3).detach().requires_grad_(mesh.rank > 0), mesh=mesh)

    with pytest.raises(RingMismatchError, match=r"hold \[4, 7\] rows of xs"):
        run_on_threads(2, cut)
    with pytest.raises(RingMismatchError, match=r"ranks \[0\] need no gradient"):
        run_on_threads(2, learned)
    with pytest.raises(OptionError, match="equally many rows"):
        ringopt.scan(added, drawn(3), [drawn(4, 3), drawn(5, 3)])
