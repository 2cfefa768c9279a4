"""Pixels of channels, channels of pixels and patches that lie side by side are views."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, ops

SHUFFLED = {
    "pixels of channels": lambda x: F.pixel_shuffle(x, 2),
    "of a picture alone": lambda x: F.pixel_shuffle(x[0], 2),
    "channels of pixels": lambda x: F.pixel_unshuffle(x, 2),
    "channels last": lambda x: F.pixel_unshuffle(x.contiguous(memory_format=torch.channels_last), 3),
    "channels in groups": lambda x: torch.channel_shuffle(x, 4),
    "patches": lambda x: F.unfold(x, (2, 3), stride=(2, 3)),
    "of patches": lambda x: F.fold(x[:, :, 0, :9], (6, 12), (2, 4), stride=(2, 4)),
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_a_shuffle_is_views(name):
    module, x = SHUFFLED[name], torch.randn(2, 8, 6, 12)
    gm, _ = after([Normalize()], module, x)
    assert set(ops(gm)) <= {"reshape", "permute", "contiguous", "clone", "select", "slice"}
    (found,), expected = gm(*gm.meta["inputs"]), module(x)
    assert found.stride() == expected.stride() and torch.equal(found, expected)
