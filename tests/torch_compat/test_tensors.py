"""Memory, writes and kinds of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.symbolic_shapes import ShapeEnv
from ringopt.torch_compat.tensors import (
    NO_TORCH_FUNCTION,
    TorchDispatchMode,
    elementwise_strides,
    is_contiguous_for_memory_format_or_false,
    is_marked_dynamic,
    is_traceable_wrapper_subclass,
    make_wrapper,
    storage_key,
    suggest_memory_format,
    version_of,
)


@pytest.mark.parametrize("fake", [False, True])
def test_tensors_of_one_memory_have_one_key(fake: bool) -> None:
    x, other = torch.ones(4, 2), torch.ones(4, 2)
    if fake:
        mode = FakeTensorMode()
        x, other = mode.from_tensor(x), mode.from_tensor(other)
    assert storage_key(x) == storage_key(x.t()) == storage_key(x[1:]) == storage_key(x.detach())
    assert storage_key(x) != storage_key(other)


def test_a_write_to_a_view_is_counted() -> None:
    x = torch.ones(4)
    before = version_of(x)
    x[1:].zero_()
    assert version_of(x) == version_of(x.detach()) == before + 1
    with torch.inference_mode():
        untracked = torch.ones(2)
    with pytest.raises(RuntimeError, match="version"):
        version_of(untracked)


class Wrapper(Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = make_wrapper(cls, inner.shape, inner.stride(), inner.dtype, inner.device)
        made.inner = inner
        return made

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(x.inner if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Wrapper(inner["inner"])


def test_a_wrapper_has_sizes_and_no_memory() -> None:
    x = Wrapper(torch.arange(6.0).view(3, 2).t())
    assert x.shape == (2, 3) and x.stride() == (1, 2) and x.dtype == torch.float32 and x.data_ptr() == 0
    assert torch.equal(torch.add(x, 1), torch.arange(6.0).view(3, 2).t() + 1)
    assert is_traceable_wrapper_subclass(x) and not is_traceable_wrapper_subclass(torch.ones(1))


def test_a_mode_sees_every_operator() -> None:
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        torch.ones(2) + 1
    assert seen == [torch.ops.aten.ones.default, torch.ops.aten.add.Tensor]


def test_memory_formats_are_told() -> None:
    x = torch.ones(2, 3, 4, 5)
    assert suggest_memory_format(x) == torch.contiguous_format
    last = x.to(memory_format=torch.channels_last)
    assert suggest_memory_format(last) == torch.channels_last
    assert is_contiguous_for_memory_format_or_false(last, memory_format=torch.channels_last)
    assert not is_contiguous_for_memory_format_or_false(x, memory_format=torch.channels_last)


def test_strides_of_elementwise_operators_are_told() -> None:
    x, y = torch.ones(2, 3).mT, torch.ones(2).expand(3, 2)
    assert elementwise_strides(x, y) == elementwise_strides(y, x) == (x + y).stride() == (1, 3)


def test_a_memory_format_that_is_open_is_no_guard() -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    with FakeTensorMode(shape_env=env):
        x = torch.empty_strided((2, 1, size, 3), (3 * size, 1, 3, 1))
    is_contiguous_for_memory_format_or_false(x, memory_format=torch.channels_last)
    assert not env.guards


def test_a_mark_of_dynamo_is_seen() -> None:
    x = torch.ones(4)
    assert not is_marked_dynamic(x)
    torch._dynamo.mark_dynamic(x, 0)
    assert is_marked_dynamic(x) and not is_marked_dynamic(x.detach())
