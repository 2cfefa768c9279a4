"""Partial softmaxes merge to the whole one, hidden rows included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor import merge_lse
from ringopt.context_parallel.executor.merge_lse import Merged, MergedAtOnce, merge_
from ringopt.hardware.devices import OF_GPUS

INF = float("inf")


def part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of some keys; a row that sees none of them has out 0 and lse -inf."""
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


def test_two_parts_are_the_whole() -> None:
    scores, values = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(2, 3, 8, 4, dtype=torch.float64)
    scores[:, :, 1, :3] = -INF  # hidden in the first part only
    scores[:, :, 2, 3:] = -INF  # in the second only
    scores[:, :, 3] = -INF  # in both
    out, lse = part(scores[..., :3], values[:, :, :3])
    merge_(out, lse, *part(scores[..., 3:], values[:, :, 3:]))
    whole_out, whole_lse = part(scores, values)
    torch.testing.assert_close(out, whole_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_scores_far_apart() -> None:
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), -3e38)
    merge_(out, lse, torch.full((1, 1, 1, 2), 2.0), torch.full((1, 1, 1), 80.0))
    assert out.eq(2.0).all() and lse.eq(80.0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_kept_wide(dtype: torch.dtype) -> None:
    q = torch.zeros(1, 1, 4, 2, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    merged = Merged(q, 3)
    for half in (slice(0, 2), slice(2, 4)):
        merged.add(half, torch.ones(1, 1, 2, 3, dtype=dtype), torch.zeros(1, 1, 2, dtype=wide))
    out, lse = merged.result()
    assert (out.dtype, lse.dtype) == (dtype, wide)
    assert out.eq(1).all() and lse.eq(0).all() and out.is_contiguous() and lse.is_contiguous()


def test_a_logit_that_leads_to_no_value() -> None:
    scores, values = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(2, 3, 8, 4, dtype=torch.float64)
    scores[:, :, 2] = -INF  # sees the logit only
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    merged = Merged(scores, 4)
    merged.add(slice(0, 5), *part(scores, values))
    merged.add_logits(slice(0, 5), logits)
    joined = torch.cat([scores, logits.unsqueeze(-1)], -1)
    out, lse = merged.result()
    torch.testing.assert_close(out, joined.softmax(-1)[..., :8] @ values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, joined.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert not out[:, :, 2].any()


def test_no_keys_at_all() -> None:
    out, lse = Merged(torch.ones(1, 2, 3, 4), 5).result()
    assert out.shape == (1, 2, 3, 5) and not out.any() and lse.eq(-INF).all()


def test_the_first_tile_of_all_rows_is_taken_as_it_is() -> None:
    merged, out = Merged(torch.ones(1, 1, 3, 4), 4), torch.randn(1, 1, 3, 4)
    merged.add(slice(0, 3), out, torch.zeros(1, 1, 3))
    assert merged.result()[0].data_ptr() == out.data_ptr()


def one_after_another(out, lse, sums, parts, lses, firsts):
    """What merge_parts_ does in one launch, where Triton can."""
    whole = [x.clone() for x in sums] or [torch.zeros(out.shape, dtype=lse.dtype), torch.full_like(lse, -INF)]
    for first, part, its in zip(firsts, parts, lses, strict=True):
        place = slice(first, first + part.shape[2])
        merge_(whole[0][:, :, place], whole[1][:, :, place], part, its)
    out.copy_(whole[0]), lse.copy_(whole[1])


ADDED = [slice(0, 4), slice(2, 8), slice(1, 8, 2), slice(5, 8), slice(0, 8), slice(0, 2), slice(4, 8), slice(0, 8, 3)]


@pytest.mark.parametrize("number", range(len(ADDED) + 1))
def test_of_parts_that_wait_to_be_merged_at_once_none_is_lost(monkeypatch, number) -> None:
    """On GPUs four wait; rows that lie apart do not, and find what waited merged."""
    monkeypatch.setattr(merge_lse, "merge_parts_", one_after_another)
    monkeypatch.setattr(merge_lse, "limits_of", lambda device: OF_GPUS)
    q, dice = torch.zeros(1, 2, 8, 4, dtype=torch.float64), torch.Generator().manual_seed(number)
    parts = [(rows, *(torch.randn(1, 2, len(range(8)[rows]), *more, dtype=q.dtype, generator=dice)
                      for more in ((3,), ()))) for rows in ADDED[:number]]  # fmt: skip
    at_once, each = MergedAtOnce(q, 3), Merged(q, 3)
    for merged in (at_once, each):
        for rows, out, lse in parts:
            merged.add(rows, out.clone(), lse.clone())
    torch.testing.assert_close(at_once.result(), each.result(), rtol=1e-12, atol=1e-12)


def test_what_is_merged_is_the_result_without_another_launch(monkeypatch) -> None:
    """Rows that lie apart are merged as they come, after the one part that waited."""
    launched = []

    def merged_at_once(*given):
        launched.append(len(given[3]))
        one_after_another(*given)

    monkeypatch.setattr(merge_lse, "merge_parts_", merged_at_once)
    monkeypatch.setattr(merge_lse, "limits_of", lambda device: OF_GPUS)
    merged = MergedAtOnce(torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16), 2)
    merged.add(slice(0, 4), torch.ones(1, 1, 4, 2), torch.zeros(1, 1, 4))
    merged.add(slice(1, 4, 2), torch.full((1, 1, 2, 2), 3.0), torch.zeros(1, 1, 2))
    assert merged.result()[0].flatten().tolist() == [1, 1, 2, 2, 1, 1, 2, 2]
    assert launched == [1]
