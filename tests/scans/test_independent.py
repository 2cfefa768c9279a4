"""Along which dims a recurrence is many: read off its body, and tried."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.scans.independent import independent_dims
from ringopt.scans.trace import kinds_of
from tests.scans.bodies import Scan, drawn


def delta(s: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    s = s * g[..., None, None].exp()
    s = s + k.mT @ (v - k @ s)
    return s, k @ s


def lstm(h: Tensor, c: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    i, f, o, g = (x + F.linear(h, w)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h, c, h


def found(scan: Scan) -> list[tuple[int, tuple[int | None, ...], tuple[int | None, ...]]]:
    return [
        (one.size, one.inputs, one.outputs)
        for one in independent_dims(scan.text, kinds_of(scan.init, scan.xs, scan.consts))
    ]


def test_batch_heads_and_values_of_a_delta_rule() -> None:
    rows = [drawn(5, 2, 3, 4, 6), drawn(5, 2, 3, 4, 7), drawn(5, 2, 3)]
    assert found(Scan(delta, [drawn(2, 3, 6, 7)], rows, [])) == [
        (7, (3, None, 3, None), (3, 3)),  # each column of the state; keys are the same for all
        (3, (1, 1, 1, 1), (1, 1)),
        (2, (0, 0, 0, 0), (0, 0)),
    ]


def test_a_step_need_not_be_affine() -> None:
    """An LSTM mixes what it carries, and knows nothing of another sequence."""
    scan = Scan(lstm, [drawn(3, 4), drawn(3, 4)], [drawn(5, 3, 16)], [drawn(16, 4)])
    assert found(scan) == [(3, (0, 0, 0, None), (0, 0, 0))]


@pytest.mark.parametrize(
    "step",
    [
        lambda s, x: (s + x - s.mean(0) - s.mean(1, keepdim=True), s),
        lambda s, x: (s.flip(0, 1) * x, s),
        lambda s, x: (s @ s * x, s),
        lambda s, x: (s.mT * x, s),
        lambda s, x: (s.roll(1, 0).roll(1, 1) + x, s),
        lambda s, x: (F.normalize(s + x, dim=(0, 1)), s),
        lambda s, x: (s.cumsum(0).cumsum(1) + x, s),
        lambda s, x: (torch.cat([s[1:], x[:1]]).cumsum(1), s),
        lambda s, x: (s.reshape(2, 8).reshape(4, 4).softmax(0).softmax(1) + x, s),
        lambda s, x: (s * x, s.sum()),  # a y that all have in common
    ],
)
def test_what_meets_is_not_independent(step) -> None:
    assert found(Scan(step, [drawn(4, 4)], [drawn(3, 4, 4)], [])) == []
