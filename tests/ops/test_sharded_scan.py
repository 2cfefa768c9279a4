"""`ringopt::sharded_scan`: a recurrence over ranks equals the loop over all steps, its gradients too; what travels has
the size of the state. Decays are mild: where the state before a rank's steps is dropped, numbers change, and the tests
see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import LAYOUTS, layout_of
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import RingMismatchError
from ringopt.ops import operators as ops
from ringopt.ops.fetch_rows import held
from ringopt.scans.segment_map import Frame
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.scans.bodies import Scan, delta_rule, diagonal, drawn, stabilised
from tests.scans.test_affine import summed, vector_decay


def several() -> Scan:
    """Two values that do not need each other, one that reads both, and the token before."""

    def step(a: Tensor, b: Tensor, c: Tensor, last: Tensor, x: Tensor, g: Tensor, w: Tensor) -> Any:
        new = c * 0.95 + a * b + last
        return a * g + x, w @ b + x, new, x + 0, new * last, a.sum(-1)

    init = [drawn(3, 4, seed=i) for i in range(4)]
    gate = (0.9 + 0.1 * torch.sigmoid(drawn(11, 3, 4))).detach().requires_grad_()
    return Scan(step, init, [drawn(11, 3, 4, seed=5), gate], [(torch.eye(3).double() * 0.9).requires_grad_()])


SCANS = {
    "delta rule": lambda: delta_rule(11),
    "diagonal": lambda: diagonal(11),
    "stabilised": lambda: stabilised(11),
    "vector decay": vector_decay,
    "summed": summed,
    "several": several,
}


def mine(scan: Scan, mesh: ThreadMesh, layout: str) -> Scan:
    """What a rank has: its steps, and the rest whole; leaves of their own."""
    rows = held(layout_of(layout, scan.xs[0].shape[0], mesh.size), mesh.rank)
    own = lambda x: x.detach().clone().requires_grad_(x.requires_grad)  # noqa: E731
    return Scan(scan.step, list(map(own, scan.init)), [own(x[rows]) for x in scan.xs], list(map(own, scan.consts)))


def over_ranks(
    scan: Scan,
    text: str,
    steps: int,
    mesh: ThreadMesh,
    layout: str,
    keeps: bool = True,
    ends: bool = True,
    states: bool = False,
) -> list[Tensor]:
    here = LAYOUTS[layout].chunks_per_rank
    segments = here * mesh.size if keeps else 0
    where = (steps, segments, layout, ends, mesh.name)
    found = ops.sharded_scan(scan.init, scan.xs, scan.consts, text, *where, keeps=states)
    results = len(found) - 2 * len(scan.init)
    assert found[results].shape[0] == here + states * scan.xs[0].shape[0]
    return list(found[:results])


def compared(scan: Scan, p: int, layout: str, keeps: bool = True, states: bool = False) -> None:
    """Outputs and all gradients with those of the loop. `states`: whether those between all steps are kept."""
    steps, text, carries, expected = scan.xs[0].shape[0], scan.text, len(scan.init), scan.loop()
    weights = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, scan.operands, weights, allow_unused=True, materialize_grads=True)

    def body(mesh: ThreadMesh) -> list[Tensor]:
        own = mine(scan, mesh, layout)
        rows = held(layout_of(layout, steps, p), mesh.rank)
        found = over_ranks(own, text, steps, mesh, layout, keeps, states=states)
        for x, whole in zip(found[:carries], expected, strict=False):
            torch.testing.assert_close(x, whole, rtol=1e-12, atol=1e-12)
        for y, whole in zip(found[carries:], expected[carries:], strict=True):
            torch.testing.assert_close(y, whole[rows], rtol=1e-12, atol=1e-12)
        here = [*weights[:carries], *(weight[rows] for weight in weights[carries:])]
        grads = torch.autograd.grad(found, own.operands, here, allow_unused=True, materialize_grads=True)
        stacked = slice(carries, carries + len(scan.xs))
        for grad, whole in zip(grads[stacked], wanted[stacked], strict=True):
            torch.testing.assert_close(grad, whole[rows], rtol=1e-11, atol=1e-12)
        return [*found[:carries], *grads[:carries], *grads[stacked.stop :]]

    ranks = run_on_threads(p, body)
    for x in zip(*(rank[:carries] for rank in ranks), strict=True):
        assert all(torch.equal(each, x[0]) for each in x)  # the same bits on all ranks
    shared = zip(*(rank[carries:] for rank in ranks), strict=True)  # first carries and consts
    for parts, whole in zip(shared, [*wanted[:carries], *wanted[carries + len(scan.xs) :]], strict=True):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-11, atol=1e-12)


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [2, 1, 3, 4])  # in this order the sample has each scan over ranks
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_over_ranks_and_its_gradients_are_those_of_the_loop(name, p, layout):
    compared(SCANS[name](), p, layout, states=p % 2 == 0)


@pytest.mark.parametrize("name", SCANS)
def test_a_program_for_any_number_of_ranks_keeps_no_matrices(name):
    compared(SCANS[name](), 3, "contiguous", keeps=False)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_without_a_step_change_nothing(steps, layout):
    compared(delta_rule(steps), 3, layout)
    compared(stabilised(steps), 3, layout, states=True)


def overflowing() -> Scan:
    """Gates whose product is inf over the steps of a rank, for a state that is small there: 0 at first, then shrunk."""

    def step(s: Tensor, x: Tensor, g: Tensor) -> Any:
        new = s * g + x
        return new, new * 2

    gates = torch.full((12, 3), 1e200, dtype=torch.float64)
    gates[8:] = 1e-200
    given = torch.zeros(12, 3, dtype=torch.float64)
    given[9:] = drawn(3, 3).detach()
    return Scan(step, [torch.zeros(3).double().requires_grad_()], [given.requires_grad_(), gates], [])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [2, 3])
def test_gates_whose_product_overflows(p, layout):
    """Where the loop has numbers, so have ranks; what the loop itself has as inf (gradients of such steps) too."""
    scan, text, expected = overflowing(), overflowing().text, overflowing().loop()
    assert all(x.isfinite().all() for x in expected)
    weights = [torch.ones_like(x) for x in expected]
    wanted = torch.autograd.grad(scan.loop(), [scan.init[0], scan.xs[0]], weights)

    def body(mesh: ThreadMesh) -> Tensor:
        own, rows = mine(scan, mesh, layout), held(layout_of(layout, 12, p), mesh.rank)
        found = over_ranks(own, text, 12, mesh, layout)
        torch.testing.assert_close(found, [expected[0], expected[1][rows]], rtol=1e-12, atol=0)
        of_init, of_xs = torch.autograd.grad(found, [own.init[0], own.xs[0]], [weights[0], weights[1][rows]])
        torch.testing.assert_close(of_xs, wanted[1][rows], rtol=1e-12, atol=0, equal_nan=True)
        return of_init

    parts = run_on_threads(p, body)
    torch.testing.assert_close(sum(parts), wanted[0], rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("way, p", [("behind", 2), ("apply", 3), ("apply_back", 3)])
def test_a_state_that_is_forgotten_is_seen(name, way, p, monkeypatch):
    """The tests above would notice that nothing passes from rank to rank."""
    original = getattr(Frame, way)
    monkeypatch.setattr(
        Frame, way, lambda frame, *given: original(frame, *(x.mul(0) if isinstance(x, Tensor) else x for x in given))
    )
    if way == "behind":
        monkeypatch.setattr(Frame, way, lambda *given: original(*given).mul(0))
    with pytest.raises(AssertionError):
        compared(SCANS[name](), p, "contiguous")


def in_dtype(scan: Scan, dtype: torch.dtype) -> Scan:
    """With the operands of a scan as they are in `dtype`."""
    cast = lambda parts: [x.detach().to(dtype).requires_grad_() for x in parts]  # noqa: E731
    return Scan(scan.step, cast(scan.init), cast(scan.xs), cast(scan.consts))


def sent(steps: int, p: int, layout: str, dtype: torch.dtype = torch.float64) -> list[tuple[int, int]]:
    scan = in_dtype(delta_rule(steps), dtype)
    text = scan.text

    def body(mesh: ThreadMesh) -> tuple[int, int]:
        own = mine(scan, mesh, layout)
        over_ranks(own, text, steps, mesh, layout)  # the ranks compare what is new to them
        with record_traffic() as forward:
            found = over_ranks(own, text, steps, mesh, layout)
        found[0].sum().backward()
        with record_traffic() as backward:
            over_ranks(own, text, steps, mesh, layout)[0].sum().backward()
        return forward.of(mesh.rank).bytes_sent, backward.of(mesh.rank).bytes_sent - forward.of(mesh.rank).bytes_sent

    return run_on_threads(p, body)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [2, 4])
def test_what_travels_has_the_size_of_the_state(p, layout):
    b, h, dk, dv = 2, 2, 4, 5
    matrix, state = b * h * dk * dk, b * h * dk * dv
    segments = LAYOUTS[layout].chunks_per_rank
    between = matrix if segments * p > 2 else 0  # the first and the last segment have no matrix
    to_each = 8 * (segments * (between + state) + state), segments * 8 * state  # and the last state, where it is read
    expected = [tuple(size * (p - 1) for size in to_each)] * p
    assert sent(8, p, layout) == sent(32, p, layout) == expected


def test_last_carries_that_nobody_reads_are_not_sent():
    scan, steps = delta_rule(8), 8
    text, expected = scan.text, scan.loop()

    def body(mesh: ThreadMesh) -> int:
        own = mine(scan, mesh, "contiguous")
        over_ranks(own, text, steps, mesh, "contiguous", ends=False)
        with record_traffic() as traffic:
            last, y = over_ranks(own, text, steps, mesh, "contiguous", ends=False)
        assert last.isnan().all()
        torch.testing.assert_close(y, expected[1][held(layout_of("contiguous", steps, 3), mesh.rank)])
        return traffic.of(mesh.rank).bytes_sent

    b, h, dk, dv = 2, 2, 4, 5
    assert run_on_threads(3, body) == [2 * 8 * b * h * dk * (dk + dv)] * 3


def test_maps_of_16_bits_travel_and_are_composed_in_float32():
    half = [tuple(size // 2 for size in of_rank) for of_rank in sent(8, 2, "contiguous")]
    assert sent(8, 2, "contiguous", torch.bfloat16) == half


def test_ranks_that_scan_with_another_body_hear_of_it():
    scan = diagonal(6)
    texts = [scan.text, replace(scan, step=lambda s, a, x, w: (a * s + 2 * x, s * w)).text]

    def body(mesh: ThreadMesh) -> None:
        over_ranks(mine(scan, mesh, "contiguous"), texts[mesh.rank], 6, mesh, "contiguous")

    with pytest.raises(RingMismatchError, match="body"):
        run_on_threads(2, body)


def test_a_rank_with_too_many_steps_is_an_error_on_all():
    scan = diagonal(6)
    text = scan.text
    with pytest.raises(RingMismatchError, match="holds 3 rows"):
        run_on_threads(2, lambda mesh: over_ranks(scan, text, 6, mesh, "contiguous"))


@pytest.mark.sample(2)
def outcome(scan: Scan, found: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Results and gradients of all operands, with 64 bits."""
    given = [weight.to(x.dtype) for x, weight in zip(found, weights, strict=True)]
    grads = torch.autograd.grad(found, scan.operands, given, allow_unused=True, materialize_grads=True)
    return [x.detach().double() for x in (*found, *grads)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", ["delta rule", "diagonal", "stabilised"])
def test_in_16_bits_ranks_err_at_most_twice_as_much_as_the_loop(name, p, dtype):
    """From the same numbers computed in 64 bits, by the norm of each result and gradient."""
    steps = 24
    low = in_dtype({"delta rule": delta_rule, "diagonal": diagonal, "stabilised": stabilised}[name](steps), dtype)
    exact, text, carries, xs = in_dtype(low, torch.float64), low.text, len(low.init), len(low.xs)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(at)) for at, x in enumerate(low.loop())]
    wanted, eager = (outcome(one, one.loop(), weights) for one in (exact, low))

    def body(mesh: ThreadMesh) -> list[Tensor]:
        rows = held(layout_of("contiguous", steps, p), mesh.rank)
        own = mine(low, mesh, "contiguous")
        cut = [*weights[:carries], *(weight[rows] for weight in weights[carries:])]
        return outcome(own, over_ranks(own, text, steps, mesh, "contiguous"), cut)

    parts = list(zip(*run_on_threads(p, body), strict=True))
    results, stacked, of_consts = len(weights), len(weights) + carries, len(weights) + carries + xs
    for at, (pieces, right, alone) in enumerate(zip(parts, wanted, eager, strict=True)):
        if carries <= at < results or stacked <= at < of_consts:
            found = torch.cat(pieces)
        else:
            found = pieces[0] if at < results else sum(pieces)
        least = torch.finfo(dtype).eps / 2 * right.norm()
        assert (found - right).norm() <= 2 * max((alone - right).norm(), least), (name, at)


@pytest.mark.parametrize("name", ["delta rule", "stabilised"])
def test_what_torch_asks_of_an_operator(name):
    scan = SCANS[name]()
    text = scan.text

    def body(mesh: ThreadMesh) -> Any:
        given = (scan.init, scan.xs, scan.consts, text, 11, 1, "contiguous", True, mesh.name)
        return torch.library.opcheck(ops.sharded_scan.default, given)

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}
