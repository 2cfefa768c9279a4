"""Every kernel against attention written out in float64; the cases that the kernels themselves get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.choose import KERNELS
from ringopt.kernels.fused import dense
from ringopt.kernels.math import Math, Modifier
from tests.harness.limits import set_limits

INF = float("inf")
CPU = torch.device("cpu")
HERE = [kernel for kernel in KERNELS if kernel.supports(torch.float32, CPU, 8, 8) is None]
EACH = pytest.mark.parametrize("kernel", HERE, ids=lambda kernel: kernel.name)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def draw(*sizes: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(
    queries: int, keys: int, heads: tuple[int, int] = (4, 2), dim: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout."""
    (hq, hkv), batch = heads, 2
    sizes = ((batch, hq, queries, dim), (batch, hkv, keys, dim), (batch, hkv, keys, dim), (batch, hq, queries, dim))
    return tuple(draw(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes))  # type: ignore[return-value]


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> list[Tensor]:
    """out and lse in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -INF)
    hidden = (scores == -INF).all(-1, keepdim=True)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return [weights @ v, scores.logsumexp(-1)]


def check(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor | None, causal: bool) -> None:
    """out, lse and gradients of one tile."""
    tolerance, leaves = TOLERANCE[q.dtype], [x.double().requires_grad_() for x in (q, k, v)]
    expected = written_out(*leaves, mask, causal, 0.3)
    grads = torch.autograd.grad(expected[0], leaves, dout.double())
    tile = TileInputs(q, k, v, 0.3, mask, causal)
    out, lse = kernel.forward(tile)
    found = kernel.backward(tile, WholeRows(dout, out.to(q.dtype), lse))
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    for got, right in zip((out, lse, *found), (*expected, *grads), strict=True):
        torch.testing.assert_close(got.double(), right.detach(), rtol=tolerance, atol=tolerance * 5)


@EACH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (3, 1)])
def test_numbers(kernel: Kernel, dtype: torch.dtype, causal: bool, heads: tuple[int, int]) -> None:
    check(kernel, *operands(9, 9, heads, dtype=dtype), None, causal)


@EACH
@pytest.mark.parametrize(("queries", "keys", "dim"), [(1, 1, 1), (5, 9, 7), (9, 5, 33), (2, 70, 100), (40, 3, 16)])
def test_odd_sizes(kernel: Kernel, queries: int, keys: int, dim: int) -> None:
    check(kernel, *operands(queries, keys, dim=dim), None, False)


@EACH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_masks(kernel: Kernel, sizes: tuple[int, int], causal: bool) -> None:
    mask = draw(*sizes, 9, 9, seed=9)
    mask[..., 4, :] = -INF  # a row that sees nothing
    mask[..., 3, :4] = -INF  # one that sees nothing below the diagonal
    mask[..., 2, ::2] = -INF
    check(kernel, *operands(9, 9), mask, causal)


@EACH
def test_a_mask_may_be_expanded(kernel: Kernel) -> None:
    mask = draw(2, 1, 1, 9, seed=9).masked_fill(draw(2, 1, 1, 9, seed=8) > 0.5, -INF)
    check(kernel, *operands(9, 9), mask.expand(2, 4, 9, 9), False)


@EACH
@pytest.mark.parametrize("seen", [0.0, -3.0])
def test_a_row_that_sees_nothing(kernel: Kernel, seen: float) -> None:
    q, k, v, dout = operands(3, 4, dtype=torch.float32)
    mask = torch.full((1, 1, 3, 4), seen)
    mask[..., 1, :] = -INF
    tile = TileInputs(q, k, v, 1.0, mask)
    out, lse = kernel.forward(tile)
    assert lse[:, :, 1].eq(-INF).all() and lse[:, :, ::2].isfinite().all()
    assert not out[:, :, 1].any()
    dq, dk, dv = kernel.backward(tile, WholeRows(dout, out, lse))
    assert not dq[:, :, 1].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@EACH
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 3), (1, 3, 0), (1, 0, 0), (0, 3, 3)])
def test_empty_tiles(kernel: Kernel, batch: int, queries: int, keys: int) -> None:
    q, k, v = (torch.ones(batch, heads, rows, 8) for heads, rows in ((4, queries), (2, keys), (2, keys)))
    tile = TileInputs(q, k, v, 1.0)
    out, lse = kernel.forward(tile)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:3] and lse.eq(-INF).all()
    grads = kernel.backward(tile, WholeRows(out, out, lse))
    assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(grads, (q, k, v), strict=True))


@EACH
def test_any_strides(kernel: Kernel) -> None:
    def strided(x: Tensor, order: tuple[int, ...]) -> Tensor:
        back = [order.index(dim) for dim in range(4)]
        return x.permute(order).contiguous().permute(back)

    q, k, v, dout = operands(9, 9)
    for order in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        check(kernel, *(strided(x, order) for x in (q, k, v, dout)), None, True)
    check(kernel, *(x.repeat_interleave(2, 2)[:, :, ::2] for x in (q, k, v, dout)), None, False)


@EACH
def test_backward_of_tiles_takes_the_lse_of_whole_rows(kernel: Kernel) -> None:
    q, k, v, dout = operands(8, 8)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = written_out(*leaves, None, False, 0.3)
    expected = torch.autograd.grad(out, leaves, dout)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for rows in (slice(0, 3), slice(3, 8)):
        for keys in (slice(0, 5), slice(5, 8)):
            tile = TileInputs(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.3)
            parts = kernel.backward(tile, WholeRows(*(x.detach()[:, :, rows] for x in (dout, out, lse))))
            for total, part, place in zip(sums, parts, (rows, keys, keys), strict=True):
                total[:, :, place] += part
    for total, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(total, right, rtol=1e-12, atol=1e-12)


@EACH
def test_gradients_of_grouped_heads_are_summed_wide(kernel: Kernel) -> None:
    q, k, v, dout = operands(9, 9, heads=(4, 1), dtype=torch.bfloat16)
    tile = TileInputs(q, k, v, 0.3)
    out, lse = kernel.forward(tile)
    _, dk, dv = kernel.backward(tile, WholeRows(dout, out.bfloat16(), lse))
    assert dk.dtype == dv.dtype == torch.float32


@EACH
def test_causal_is_for_squares(kernel: Kernel) -> None:
    q, k, v, dout = operands(3, 4)
    tile = TileInputs(q, k, v, 1.0, causal=True)
    with pytest.raises(ValueError, match="a causal tile is square; found 3 queries and 4 keys"):
        kernel.forward(tile)
    with pytest.raises(ValueError, match="a causal tile is square; found 3 queries and 4 keys"):
        kernel.backward(tile, WholeRows(dout, q, q[..., 0]))


# ---- the written-out kernel ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scores", [1, 100, 1 << 22])
def test_math_takes_a_few_rows_at_a_time(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, scores=scores)
    for causal in (False, True):
        check(Math(), *operands(9, 9), None, causal)
        check(Math(), *operands(9, 9), draw(1, 4, 9, 9, seed=9), causal)


def test_math_takes_values_of_another_width() -> None:
    q, k, _, _ = operands(9, 9)
    check(Math(), q, k, draw(2, 2, 9, 5, seed=7), draw(2, 4, 9, 5, seed=8), None, True)


@pytest.mark.parametrize("scores", [1, 1 << 22])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_the_gradient_of_the_mask(
    sizes: tuple[int, int], causal: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, scores=scores)
    q, k, v, dout = operands(9, 9)
    mask = draw(*sizes, 9, 9, seed=9).requires_grad_()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = written_out(*leaves, mask, causal, 0.3)
    expected = torch.autograd.grad(out, (*leaves, mask), dout)
    with torch.no_grad():
        found = Math().backward_with_mask(TileInputs(q, k, v, 0.3, mask, causal), WholeRows(dout, out, lse))
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def softcapped(temperature: Tensor) -> Modifier:
    """temperature * tanh(score), [H]; its parts are the gradient."""
    return Modifier(
        lambda scores, rows: temperature.view(1, -1, 1, 1) * scores.tanh(),
        [temperature],
        [torch.zeros_like(temperature)],
    )


@pytest.mark.parametrize("scores", [1, 8 * 200, 1 << 22])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_are_changed_and_weights_that_are_dropped(
    causal: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, scores=scores)
    q, k, v, dout = operands(9, 9)
    mask, factor = draw(2, 4, 9, 9, seed=9).requires_grad_(), (draw(2, 4, 9, 9, seed=5) > 0).double() * 2
    leaves, temperature = [x.clone().requires_grad_() for x in (q, k, v)], draw(4, seed=6).requires_grad_()
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    changed = temperature.view(1, -1, 1, 1) * (leaves[0] @ keys.mT * 0.3).tanh() + mask
    changed = changed.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -INF) if causal else changed
    expected = [(changed.softmax(-1) * factor) @ values, changed.logsumexp(-1)]
    grads = torch.autograd.grad(expected[0], (*leaves, mask, temperature), dout)
    modifier = softcapped(temperature)
    kernel = Math(modifier=modifier, factor=lambda rows: factor[:, :, rows])
    tile = TileInputs(q, k, v, 0.3, mask, causal)
    with torch.no_grad():
        found = [*kernel.forward(tile)]
        found += kernel.backward_with_mask(tile, WholeRows(dout, *found))
    for got, right in zip((*found, *modifier.parts), (*expected, *grads), strict=True):
        torch.testing.assert_close(got, right.detach(), rtol=1e-12, atol=1e-12)


def test_a_modifier_without_the_score_has_no_gradient_of_it() -> None:
    q, k, v, dout = operands(5, 7)
    for change in (lambda scores, rows: torch.ones_like(scores), lambda scores, rows: scores.detach()):
        kernel, tile = Math(modifier=Modifier(change)), TileInputs(q, k, v, 0.3)
        dq, dk, _ = kernel.backward(tile, WholeRows(dout, *kernel.forward(tile)))
        assert not dq.any() and not dk.any()


class Largest(TorchDispatchMode):
    """The most bytes of one tensor that an operation made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return result


def test_what_is_held_at_once_stays_below_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, scores=8 * 2 * 4 * 256 * 4)  # four rows of queries
    q, k, v, dout = operands(256, 256, dtype=torch.float32)
    drop = Dropout(0.5, torch.tensor(1))
    kernel = Math(
        modifier=Modifier(lambda scores, rows: scores.tanh() * 2),
        factor=lambda rows: drop.factor(2, 4, range(rows.start, rows.stop), range(256), torch.float32),
    )
    tile = TileInputs(q, k, v, 0.3)
    with Largest() as made:
        kernel.backward(tile, WholeRows(dout, *kernel.forward(tile)))
    assert made.bytes == 2 * 4 * 256 * 4 * 8  # [B, Hq, 4, Sk] of int64, and nothing of the size of the tile


# ---- what flash_cpu gets wrong, and its adapter is for ---------------------------------------------------------------
def test_the_kernel_beneath_still_has_its_traps() -> None:
    """When one of these fails, torch has changed: look whether the adapter still needs its care."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v, _ = operands(3, 4, heads=(2, 2), dtype=torch.float32)
    mask = torch.zeros(3, 4)
    mask[1] = -INF
    assert flash(q, k, v, attn_mask=mask)[1][:, :, 1].eq(0.0).all(), "lse of a hidden row"
    transposed = q.mT.contiguous().mT
    assert not torch.allclose(flash(transposed, k, v)[0], flash(q, k, v)[0]), "last dim taken for dense"


def test_what_a_launch_reads_has_its_last_dim_in_one_piece() -> None:
    x = torch.randn(3, 4, 5)
    for whole in (x, x[:, :2], x[..., 1:3], x.mT[..., :1]):  # of one element, nothing is apart
        assert dense(whole) is whole
    for apart in (x.mT, x.mT[..., :2], x.mT[:, :1], x[..., ::2], x.mT.contiguous().mT):
        assert dense(apart).is_contiguous() and torch.equal(dense(apart), apart)


def test_few_queries_are_computed_at_once() -> None:
    """A piece at a time where their scores are many."""
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    seen: list[slice] = []

    def factor(rows: slice) -> Tensor:
        seen.append(rows)
        return torch.ones(1, 2, rows.stop - rows.start, 7)

    Math(factor=factor).forward(TileInputs(q, k, v, 1.0))
    assert seen == [slice(0, 7)]
