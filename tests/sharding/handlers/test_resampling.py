"""More rows made of a sequence: neighbours repeated, transposed convolutions, pixels made of channels."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.ops.fetch_rows import window_rows
from ringopt.sharding.handlers.resampling import Reach
from tests.harness.translation import validate

C, ROWS = 6, 11


def given(*sizes):
    torch.manual_seed(sum(sizes))
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


class Between(nn.Module):
    """Convolutions before and behind, so that the sequence begins and ends in rows."""

    def __init__(self, more, dims=1):
        super().__init__()
        torch.manual_seed(0)
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.before, self.more, self.behind = kind(C, C, 3, padding=1), more, kind(C, C, 3, padding=1)
        self.double()

    def forward(self, x):
        return self.behind(self.more(self.before(x).tanh()))


TRANSPOSED = {
    "as long as its stride": lambda: nn.ConvTranspose1d(C, C, 2, stride=2),
    "twice as long": lambda: nn.ConvTranspose1d(C, C, 4, stride=2, padding=1),
    "three times": lambda: nn.ConvTranspose1d(C, C, 9, stride=3, padding=3, groups=2, bias=False),
    "without padding": lambda: nn.ConvTranspose1d(C, C, 5, stride=2),
    "stride 1": lambda: nn.ConvTranspose1d(C, C, 4, padding=2),
    "rows behind all": lambda: nn.ConvTranspose1d(C, C, 3, stride=2, padding=1, output_padding=1),
    "dilated": lambda: nn.ConvTranspose1d(C, C, 3, stride=2, padding=1, dilation=2),
    "fewer rows than are read": lambda: nn.ConvTranspose1d(C, C, 3, padding=2),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name, p):
    verdict = validate(p, Between(TRANSPOSED[name]()), given(2, C, ROWS))
    assert not verdict.wrong, verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert verdict.report.sharded_fraction == 1.0


def test_a_kernel_shorter_than_its_stride_has_gaps():
    """Rows between them are the bias alone: it is computed whole."""
    verdict = validate(2, Between(nn.ConvTranspose1d(C, C, 1, stride=3, padding=1)), given(1, C, ROWS))
    assert not verdict.wrong and "conv_transpose1d" in [gather.op for gather in verdict.report.gathers]


@pytest.mark.parametrize("stride, padding, kernel, dilation", [(2, 1, 4, 1), (3, 0, 7, 1), (2, 3, 3, 3), (1, 2, 5, 1)])
def test_the_rows_that_go_into_a_row(stride, padding, kernel, dilation):
    """All of them, and one beyond at most."""
    reach = Reach(stride, padding, dilation * (kernel - 1))
    for row in range(12):
        into = [i for i in range(-9, 20) if (row + padding - i * stride) in range(0, dilation * kernel, dilation)]
        _, step, start, width, apart = (*reach.wanted(12).pieces[0], 1)[:5]
        first = (row * step + start) // apart
        assert set(into) <= set(range(first, first + width)) and width <= reach.behind // stride + 1


def test_windows_that_lie_apart():
    """Two windows begin at each row."""
    wanted = window_rows(8, 1, 1, 2, 2)
    assert wanted.ranges("contiguous", 2, 0) == [range(0, 4)] and wanted.ranges("contiguous", 2, 1) == [range(2, 6)]


PICTURES = {
    "neighbours repeated": (2, lambda: nn.Upsample(scale_factor=2)),
    "of a video": (3, lambda: nn.Upsample(scale_factor=(1, 2, 2))),
    "a transposed convolution": (2, lambda: nn.ConvTranspose2d(C, C, 4, stride=2, padding=1)),
    "of a video too": (3, lambda: nn.ConvTranspose3d(C, C, (1, 4, 4), stride=(1, 2, 2), padding=(0, 1, 1))),
    "pixels of channels": (2, lambda: nn.Sequential(nn.Conv2d(C, 4 * C, 1), nn.PixelShuffle(2))),
    "channels of pixels": (2, lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(4 * C, C, 1))),
    "means of a video": (3, lambda: nn.AvgPool3d(3, stride=(1, 2, 2), padding=1)),
    "largest of a video": (3, lambda: nn.MaxPool3d(2, stride=1)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    dims, more = PICTURES[name]
    sizes = {2: (10, 6), 3: (3, 10, 6)}[dims]
    for p in (2, 3):
        verdict = validate(p, Between(more(), dims), given(1, C, *sizes))
        assert not verdict.wrong, verdict.wrong
        assert [gather.op for gather in verdict.report.gathers] == ["output"]
        assert verdict.report.sharded_fraction == 1.0


@pytest.mark.parametrize("factor", [2.0, 2.01, 1.01])
def test_neighbours_by_a_scale_factor(factor):
    """By 2.01 there are twice as many, and by 1.01 as many as there were, and some come of other rows."""
    verdict = validate(2, Between(nn.Upsample(scale_factor=factor)), given(2, C, 64))
    assert not verdict.wrong, verdict.wrong


def test_rows_left_and_right_are_kept_apart():
    """A vocoder cuts what its transposed convolutions make too much."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.ConvTranspose1d(C, C, 8, stride=4)

        def forward(self, x):
            return F.leaky_relu(self.layer(x)[..., 2:-2])

    verdict = validate(3, Between(Cut()), given(1, C, ROWS))
    assert not verdict.wrong and [gather.op for gather in verdict.report.gathers] == ["output"]
