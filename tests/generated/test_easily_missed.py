"""What planted faults showed no other test to see: each line is right today, and a likely mistake makes it wrong.

Each line stands between two attentions, as in test_hostile.py, on 2 and 3 ranks in both layouts.
"""

from __future__ import annotations

import pytest

from tests.generated.drawing import Program
from tests.generated.test_hostile import ATTENTION
from tests.generated.test_programs import verdict

CASES = [(2, "contiguous"), (3, "zigzag")]
PAIRS = "i = torch.arange(x.shape[1]); "

#: name: (line, what comes of it)
LINES = {
    # The bounds are met by scores, so that a clamp that is lost, or a bound taken for the other, shows.
    "scores clamped within their range": (
        "q, k, v = heads(x * 2, 1) * 3; s = q @ k.mT; s = s / s.detach().abs().amax() * 4; "
        "x = x + merge(s.clamp(-2, 2).softmax(-1) @ v)",
        "gathered",
    ),
    "scores clamped": ("q, = heads(x * 3, 1); x = x + merge((q @ q.mT).clamp(-2, 2).softmax(-1) @ q)", "exact"),
    "scores clamped below": ("q, = heads(x * 3, 1); x = x + merge((q @ q.mT).clamp(min=0.5).softmax(-1) @ q)", "exact"),
    "documents whose number comes again": (
        "d = torch.tensor([0, 0, 1, 1, 0, 0]).repeat_interleave(x.shape[1] // 6); q, = heads(x, 1); "
        "x = x + merge(sdpa(q, q, q, attn_mask=d[:, None] == d))",
        "exact",
    ),
    "causal documents whose number comes again": (
        "d = torch.tensor([0, 1, 0, 1, 1, 0]).repeat_interleave(x.shape[1] // 6); i = torch.arange(x.shape[1]); "
        "q, = heads(x, 1); x = x + merge(sdpa(q, q, q, attn_mask=(d[:, None] == d) & (i <= i[:, None])))",
        "exact",
    ),
    "keys and values repeated by different factors": (
        "q, = heads(F.linear(x, p(16, 8)), 1); k, = heads(x, 1); v = k[:, :1] * 2; "
        "x = x + merge((q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(4, 1))[..., :8]",
        "exact",
    ),
    "keys repeated in turns, values in runs": (
        "q, = heads(F.linear(x, p(16, 8)), 1); k, = heads(x, 1); "
        "x = x + merge((q @ k.repeat(1, 2, 1, 1).mT).softmax(-1) @ k.repeat_interleave(2, 1))[..., :8]",
        "exact",
    ),
    "a factor of head and key after the softmax": (
        "q, k, v = heads(x, 1) * 3; f = F.linear(x, p(2, 8)).mT[:, :, None]; "
        "x = x + merge(((q @ k.mT).softmax(-1) * f) @ v)",
        "gathered",
    ),
    "index_add with alpha": (
        "i = torch.arange(x.shape[1]).flip(0); x = x.index_add(1, i, x.sin(), alpha=0.25)",
        "either",
    ),
    "index_add into buckets with alpha": (
        "i = torch.arange(x.shape[1]) // 3; s = torch.zeros(x.shape[0], 8, 8, dtype=x.dtype); "
        "x = x + s.index_add(1, i, x, alpha=-2)[:, i]",
        "exact",
    ),
    "embedding by frequency": (
        "x = x + F.embedding(ids, p(7, 8), scale_grad_by_freq=True)[:, :x.shape[1]]",
        "either",
    ),
    "embedding with a padding word": (
        "x = x + F.embedding(ids, p(7, 8), padding_idx=3)[:, :x.shape[1]]",
        "either",
    ),
    "gather whose source is longer than its index": (
        "i = torch.arange(x.shape[1] - 5)[None, :, None].expand(x.shape[0], -1, 8) + 5; "
        "y = x.gather(1, i); x = x + y.mean(1, True)",
        "either",
    ),
    "gather along the channels, fewer tokens": (
        "i = ids[:, :x.shape[1] - 4, None].expand(-1, -1, 3); y = x.gather(2, i); x = x + y.sum((1, 2))[:, None, None]",
        "either",
    ),
    "bias of a quotient rounded down": (
        PAIRS + "d = i - i[:, None]; q, = heads(x, 1); b = torch.div(d, 3, rounding_mode='floor'); "
        "x = x + merge((q @ q.mT + b * 0.1).softmax(-1) @ q)",
        "exact",
    ),
    "bias of a quotient rounded to zero": (
        PAIRS + "d = i - i[:, None]; q, = heads(x, 1); b = torch.div(d, 3, rounding_mode='trunc'); "
        "x = x + merge((q @ q.mT + b * 0.1).softmax(-1) @ q)",
        "exact",
    ),
    "mask of a quotient rounded to zero": (
        PAIRS + "d = i - i[:, None]; q, = heads(x, 1); "
        "x = x + merge(sdpa(q, q, q, attn_mask=torch.div(d, 3, rounding_mode='trunc') == 0))",
        "exact",
    ),
    "bias of a remainder": (
        PAIRS + "d = i - i[:, None]; q, = heads(x, 1); "
        "x = x + merge((q @ q.mT + torch.fmod(d, 3) * 0.1 + torch.remainder(d, 5) * 0.2).softmax(-1) @ q)",
        "exact",
    ),
    "rows counted from the end": (
        "n = x.shape[1]; i = torch.arange(n) - n; y = x[:, i]; x = x + y.flip(1) * 0.5",
        "either",
    ),
    "slice from below the first row": ("n = x.shape[1]; x = x + x[:, -n - 3:] * 0.5", "exact"),
    "slice of rows from the end": ("x = x + x[:, -7:-2].mean(1, True)", "exact"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("p", "layout"), CASES)
@pytest.mark.parametrize("name", LINES)
def test_right(name: str, p: int, layout: str) -> None:
    line, expected = LINES[name]
    program = Program((ATTENTION, line, ATTENTION), ("logits.square().mean()", "loss, x"), length=24)
    found = verdict(program, p, layout)
    assert found in (("exact", "gathered") if expected == "either" else (expected,))
