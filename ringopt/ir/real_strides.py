"""Fake values with the strides of the real ones.

Torch's fake kernels of a few operators order the dims of a result in another way than the kernels do (torch 2.13; found
by calling every operator of torch's OpInfo database on operands in several layouts). Eager and
torch.compile(backend="aot_eager") return the strides of the kernels, and so does ringopt: views of an output, and other
graphs that read it, see the same strides. Only results of a forward are here: a gradient takes the strides of what it
is a gradient of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.operators import KERNEL_ORDERED_NORMS
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.symbolic_shapes import free_unbacked_symbols
from ringopt.torch_compat.tensors import elementwise_strides, suggest_memory_format

aten = torch.ops.aten
Strides = Callable[[Tensor, Sequence[Any]], Sequence[Any]]  # of a result, of that result and the arguments


def contiguous(result: Tensor, _args: Sequence[Any]) -> Sequence[Any]:
    """Row-major."""
    return torch.empty_like(result, memory_format=torch.contiguous_format).stride()


def as_operand(result: Tensor, args: Sequence[Any]) -> Sequence[Any]:
    """In the memory format of the first operand."""
    return torch.empty_like(result, memory_format=suggest_memory_format(args[0])).stride()


def rolled(result: Tensor, args: Sequence[Any]) -> Sequence[Any]:
    """The kernel joins two slices, which keeps channels last, or copies where nothing moves, which does not."""
    x, shifts, dims = (*args, ())[:3]
    if not dims or suggest_memory_format(x) == torch.contiguous_format:
        return contiguous(result, args)
    moves = all(shift % x.shape[dim] != 0 for shift, dim in zip(shifts, dims, strict=True))
    return as_operand(result, args) if moves else contiguous(result, args)


def iterated(_result: Tensor, args: Sequence[Any]) -> Sequence[Any]:
    """As TensorIterator orders the dims of all operands."""
    return elementwise_strides(*torch.broadcast_tensors(*(x for x in args if isinstance(x, Tensor))))


def indexed(result: Tensor, args: Sequence[Any]) -> Sequence[Any]:
    """As TensorIterator orders the dims of the source, which does not move along those of the indices, and of the
    indices, which the fake kernel leaves out."""
    x, given = args
    at = {dim: index for dim, index in enumerate(given) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in at.values()):
        return result.stride()
    indices = torch.broadcast_tensors(*at.values())
    first, last = min(at), max(at)
    adjacent = len(at) == last - first + 1  # else the dims of the indices come first
    before = list(x.stride()[:first]) if adjacent else []
    after = [stride for dim, stride in enumerate(x.stride()) if dim not in at and (not adjacent or dim > last)]
    source = x.as_strided(result.shape, [*before, *[0] * indices[0].dim(), *after])
    return elementwise_strides(source, *(between(index, len(before), result.shape) for index in indices))


def between(index: Tensor, first: int, shape: Sequence[Any]) -> Tensor:
    """`index` along the dims of `shape` from `first` on, constant along the others, with the strides that reshape and
    expand of the kernels give dims of size 1, which decide where others are equal."""
    sizes = [1] * first + list(index.shape) + [1] * (len(shape) - first - index.dim())
    own = [0] * first + list(index.stride())
    strides: list[Any] = []
    beyond = index.stride()[-1] if index.dim() else 1
    for dim in reversed(range(len(shape))):
        stride = beyond if sizes[dim] == 1 else own[dim]
        strides.insert(0, stride if sizes[dim] == shape[dim] else 0)
        beyond = stride * sizes[dim]
    return index.as_strided(shape, strides)


ITERATED = ("copysign.Tensor", "div.Tensor_mode", "floor_divide.default", "heaviside.default", "logaddexp.default")
# By operator, the strides of its first result: on any device, and on the CPU.
EVERYWHERE: dict[Any, Strides] = {
    **{getattr(getattr(aten, name), kind): iterated for name, kind in (full.split(".") for full in ITERATED)},
    aten.index.Tensor: indexed,
}
ON_CPU: dict[Any, Strides] = {
    **dict.fromkeys((*KERNEL_ORDERED_NORMS, aten.channel_shuffle.default, aten.max_unpool2d.default), as_operand),
    **dict.fromkeys((aten.log_sigmoid_forward.default, aten.normal.Tensor_Tensor, aten.pow.Scalar), contiguous),
    aten.roll.default: rolled,
}


class RealStrides(FakeTensorMode):
    """torch's FakeTensorMode, with the strides of the kernels."""

    inside = False  # of another operator, whose result torch remembers for all modes of a process: none of ours goes in

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        # torch makes each result of open sizes twice, to see that it can be made again, and seldom asks for it.
        self.cache_enabled = self.cache_enabled and self.shape_env is None

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What FakeTensorMode gives for `func`, with the strides of the kernel."""
        if self.inside:
            return super().dispatch(func, types, args, kwargs or {})
        self.inside = True
        try:
            return self.with_strides(func, args, super().dispatch(func, types, args, kwargs or {}))
        finally:
            self.inside = False

    def with_strides(self, func: Any, args: Sequence[Any], found: Any) -> Any:
        """What `func` gave for `args`, its first result in the strides of the kernel."""
        rule = EVERYWHERE.get(func) or ON_CPU.get(func)
        first, *others = found if isinstance(found, tuple | list) else (found,)
        if rule is None or not isinstance(first, Tensor) or (func in ON_CPU and first.device.type != "cpu"):
            return found
        if free_unbacked_symbols([x for x in (first, *tree_leaves(args)) if isinstance(x, Tensor)]):
            return found  # whose strides cannot be compared
        with self:
            strides = tuple(rule(first, args))
            if strides != tuple(first.stride()):
                first = torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.device)
        return (first, *others) if isinstance(found, tuple | list) else first
