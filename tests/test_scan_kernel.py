"""`ringopt.scan_kernel`: a kernel that takes a state and gives the last one, over ranks as threads, equals the kernel
on all tokens, gradients too. The kernel is a stand-in of fla's: its arguments and layout (B T H D), in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringopt
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError
from ringopt.ops.kernel_scan import KernelScan
from ringopt.scans.segment_map import Frame
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.scans.bodies import drawn

B, T, H, K, V = 2, 7, 2, 3, 4


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As fla's: S = exp(g) S + beta k (v - k (exp(g) S)), o = q S."""
    state = initial_state if initial_state is not None else q.new_zeros(B, H, K, V)
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        new = (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * new[:, :, None]
        out.append((q[:, t, :, None] @ state)[:, :, 0] * (scale or K**-0.5))
    return torch.stack(out, 1), state if output_final_state else None


def gated_delta_rule(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)


def bounded(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """No step of which is affine; two outputs."""
    out = []
    for t in range(q.shape[1]):
        state = (state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]).tanh()
        out.append((q[:, t, :, None] @ state)[:, :, 0])
    return (torch.stack(out, 1), v * beta[..., None]), state


MIXED = ringopt.AffineState(axes=("point", "point", "mixed", "free"), additive=(2,))
KERNELS = {"maps": (gated_delta_rule, MIXED), "in turn": (gated_delta_rule, None), "not affine": (bounded, None)}


def operands() -> list[Tensor]:
    """The state, and xs, that forget little."""
    unit = torch.nn.functional.normalize(drawn(B, T, H, K, seed=1).detach(), dim=-1)
    gates = [-0.1 * drawn(B, T, H).detach().sigmoid(), drawn(B, T, H, seed=1).detach().sigmoid()]
    given = [drawn(B, H, K, V).detach(), drawn(B, T, H, K).detach(), unit, drawn(B, T, H, V).detach(), *gates]
    return [x.requires_grad_() for x in given]


def outcome(outputs: Any, last: Tensor, learned: list[Tensor]) -> list[Tensor]:
    """Results, and gradients of a sum that weighs each entry."""
    found = [*([outputs] if isinstance(outputs, Tensor) else outputs), last]
    total = sum((x * torch.arange(1.0, x.numel() + 1).view_as(x).cos()).sum() for x in found)
    return [*(x.detach() for x in found), *torch.autograd.grad(total, learned)]


def compared(name: str, p: int, layout: str) -> None:
    run, affine = KERNELS[name]
    state, *xs = operands()
    wanted = outcome(*run(state, *xs), [state, *xs])

    def body(mesh: ThreadMesh) -> list[Tensor]:
        leaves, where = operands(), {"mesh": mesh, "layout": layout}
        rows = [ringopt.shard(x, 1, **where) for x in leaves[1:]]
        outputs, last = ringopt.scan_kernel(run, leaves[0], rows, affine=affine, **where)
        parts = [outputs] if isinstance(outputs, Tensor) else outputs
        return outcome([ringopt.unshard(x, 1, length=T, **where) for x in parts], last, leaves)

    for found in run_on_threads(p, body):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("p", "layout"), [(1, "contiguous"), (2, "zigzag"), (3, "contiguous"), (3, "zigzag")])
@pytest.mark.parametrize("name", KERNELS)
def test_it_is_the_kernel_on_all_tokens(name: str, p: int, layout: str) -> None:
    compared(name, p, layout)


@pytest.mark.parametrize("way", ["apply", "apply_back"])
def test_a_state_that_is_forgotten_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Frame, way)
    monkeypatch.setattr(Frame, way, lambda frame, of, x: original(frame, of, torch.zeros_like(x)))
    monkeypatch.setattr(KernelScan, "hold_against", lambda *_: None)
    with pytest.raises(AssertionError):
        compared("maps", 2, "contiguous")


def over_two(run: Any, affine: Any) -> list[int]:
    """Bytes that each rank sends for the scan, forward."""

    def body(mesh: ThreadMesh) -> int:
        state, *xs = (x.detach() for x in operands())
        rows = [ringopt.shard(x, 1, mesh=mesh) for x in xs]
        ringopt.scan_kernel(run, state, rows, affine=affine, mesh=mesh)
        with record_traffic() as traffic:
            ringopt.scan_kernel(run, state, rows, affine=affine, mesh=mesh)
        mine = [event for event in traffic.events if event.rank == mesh.rank]
        return sum(event.bytes for event in mine if event.label == "maps of a scan")

    return run_on_threads(2, body)


def test_what_travels_has_the_size_of_the_state() -> None:
    assert over_two(gated_delta_rule, MIXED) == [8 * B * H * (K * K + K * V)] * 2


@pytest.mark.parametrize(
    "affine", [ringopt.AffineState(("point", "point", "point", "free"), (2,)), ringopt.AffineState(MIXED.axes, (0,))]
)
def test_what_is_not_as_it_is_told_is_an_error_on_all(affine: Any) -> None:
    with pytest.raises(OptionError, match="is not affine in the way that is told"):
        over_two(gated_delta_rule, affine)
    with pytest.raises(OptionError, match="is not affine in the way that is told"):
        over_two(bounded, MIXED)


def test_what_learns_is_among_the_operands() -> None:
    weight = torch.ones(K, dtype=torch.float64, requires_grad=True)

    def body(mesh: ThreadMesh) -> Any:
        state, *xs = operands()
        rows = [ringopt.shard(x, 1, mesh=mesh) for x in xs]
        run = lambda s, q, *others: gated_delta_rule(s, q * weight, *others)  # noqa: E731
        return ringopt.scan_kernel(run, state, rows, mesh=mesh)

    with pytest.raises(OptionError, match=r"not among its operands \(\[3\]"):
        run_on_threads(2, body)
