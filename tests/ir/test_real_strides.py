"""Fake values have the strides that the CPU kernels give, where torch's own fake kernels have others."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ringopt.ir.real_strides import EVERYWHERE, ON_CPU, RealStrides
from tests.harness.translation import validate_function

aten = torch.ops.aten
ACROSS = torch.randn(5, 10).mT
LAST = torch.randn(2, 4, 6, 8).contiguous(memory_format=torch.channels_last)
COLUMN = torch.rand(10, 1)
CALLS = {
    "copysign": (aten.copysign.Tensor, ACROSS, COLUMN),
    "div by floor": (lambda x, y: aten.div.Tensor_mode(x, y, rounding_mode="floor"), ACROSS, COLUMN),
    "floor_divide": (aten.floor_divide.default, ACROSS, COLUMN),
    "heaviside": (aten.heaviside.default, COLUMN, ACROSS),
    "logaddexp": (aten.logaddexp.default, COLUMN, ACROSS),
    "channel_shuffle": (aten.channel_shuffle.default, LAST, 2),
    "max_unpool2d": (aten.max_unpool2d.default, LAST, torch.zeros_like(LAST).long(), [12, 16]),
    "log_sigmoid": (aten.log_sigmoid_forward.default, ACROSS),
    "normal": (aten.normal.Tensor_Tensor, ACROSS, ACROSS.abs()),
    "a number to a power": (aten.pow.Scalar, 2.0, ACROSS),
    "roll": (aten.roll.default, LAST, [1, 9], [1, 2]),
    "roll, not moved": (aten.roll.default, LAST, [1, 8], [1, 3]),
    "roll, flat": (aten.roll.default, LAST, [3]),
    "roll of two dims": (aten.roll.default, ACROSS, [1], [0]),
    "batch_norm": (aten.native_batch_norm.default, torch.randn(2, 6, 4).mT, None, None, None, None, True, 0.1, 1e-5),
    "index between dims of one": (aten.index.Tensor, torch.randn(1, 8, 9).mT[:, None], [None, None, torch.arange(9)]),
    "index, transposed": (aten.index.Tensor, torch.randn(7, 5), [torch.arange(6).view(3, 2).mT]),
}


def strides(mode: FakeTensorMode | None, call: tuple) -> tuple:
    target, *args = call
    if mode is None:
        found = target(*args)
    else:
        with mode:
            fake = lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x  # noqa: E731
            found = target(*([fake(y) for y in x] if isinstance(x, list) else fake(x) for x in args))
    return (found[0] if isinstance(found, tuple) else found).stride()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_strides_are_those_of_the_kernel(call):
    assert strides(RealStrides(), call) == strides(None, call)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="what torch 2.13 tells")
def test_torch_tells_other_strides():
    """What a rule is for; one that is for nothing goes."""
    told = {name: strides(FakeTensorMode(), call) != strides(None, call) for name, call in CALLS.items()}
    same = {"roll, not moved", "roll, flat", "roll of two dims", "log_sigmoid"}
    assert {name for name, other in told.items() if not other} <= same
    assert len(EVERYWHERE) + len(ON_CPU) == 18  # six of them batch norms


def drawn_index(dice: random.Random) -> tuple:
    """A source and indices of one to three dims in any order, many of size 1."""
    shape = [dice.choice([1, 1, 2, 3, 5]) for _ in range(dice.randint(1, 4))]
    order = dice.sample(range(len(shape)), len(shape))
    x = torch.empty(shape).permute(order).contiguous().permute([order.index(dim) for dim in range(len(shape))])
    sizes = [dice.choice([1, 2, 4]) for _ in range(dice.randint(1, 3))]
    indices: list[Tensor | None] = [None] * len(shape)
    for dim in dice.sample(range(len(shape)), dice.randint(1, min(2, len(shape)))):
        index = torch.zeros(sizes, dtype=torch.long)
        indices[dim] = index.mT.contiguous().mT if len(sizes) > 1 and dice.random() < 0.5 else index
    return aten.index.Tensor, x, indices


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_strides_of_any_index(seed):
    dice = random.Random(seed)
    for _ in range(100):
        call = drawn_index(dice)
        shape = call[0](*call[1:]).shape
        found, real = strides(RealStrides(), call), strides(None, call)
        assert [a for a, n in zip(found, shape, strict=True) if n > 1] == [
            a for a, n in zip(real, shape, strict=True) if n > 1
        ], [(x.shape, x.stride()) for x in (call[1], *call[2]) if x is not None]


def test_a_mask_beside_numbers_of_as_many_rows_as_it_picks():
    """How many a mask picks is open, until the program says so. A mask has no strides along what it picks."""
    mode, x, mask = RealStrides(shape_env=ShapeEnv()), torch.randn(5, 3), torch.tensor([1, 0, 1, 0, 1]) > 0
    with mode:
        x, mask = mode.from_tensor(x), mode.from_tensor(mask)
        torch._check(x[mask].shape[0] == 3)
        found = x[mask, torch.arange(3)]
    assert (found.shape, found.stride()) == ((3,), (1,))


class Rolled(nn.Module):
    """Attention beside outputs that lie as a roll and an index leave them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        last = x.mT[:, None].contiguous(memory_format=torch.channels_last)
        return last.roll(1, -1).mT, x.mT.contiguous().mT[:, None][:, :, torch.arange(x.shape[1]) * 3 % x.shape[1]]


@pytest.mark.parametrize("p", [2, 3])
def test_outputs_lie_as_in_one_process(p):
    x = torch.randn(1, 13, 8, dtype=torch.float64)
    result = validate_function(p, Rolled(), (x,))
    assert not result.wrong and not result.report.refusal
