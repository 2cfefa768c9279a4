"""A whole tensor of which every rank holds its rows, gathered when somebody reads it.

What a model returns beside its loss is often never read: the logits of a language model are the largest tensor of a
step, and gathering them its dearest message. A `Lazy` has the size, dtype and gradient of the whole tensor; the first
operator that reads its numbers gathers them, once, and the operator runs on the result. The gradient of a whole tensor
is whole and the same on every rank, so each rank takes its rows of it and nothing is sent.

Reading is a collective: all ranks read, or none. Before the rows travel, the ranks compare what they read, over a group
of their own: a rank that reads alone ends in an error, and its messages meet no others.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.consistency import digest
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh
from ringopt.errors import RingCommError, RingMismatchError
from ringopt.ir.placement import Spread, same_rows
from ringopt.ops import operators
from ringopt.output.printable import logger
from ringopt.torch_compat.autograd import never_compiled
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily
from ringopt.torch_compat.operators import TO_COPY
from ringopt.torch_compat.pytree import tree_map_only
from ringopt.torch_compat.tensors import NO_TORCH_FUNCTION, make_wrapper
from ringopt.torch_compat.tracing import disable_dynamo

log = logger(__name__)

PATIENCE = 10.0  # seconds until a rank that waits for the others says so

aten, ops = torch.ops.aten, operators


def gathered(spread: Spread, rows: Tensor, group: str) -> Tensor:
    """Of every rank's rows the whole, with the strides it is to have."""
    at = spread.placement
    whole: Tensor = ops.gather(rows, at.dim, at.outer, at.length, at.inner, spread.layout, group)
    if whole.stride() == spread.stride:
        return whole
    return torch.empty_strided(spread.size, spread.stride, dtype=whole.dtype, device=whole.device).copy_(whole)


def cut(spread: Spread, whole: Tensor) -> Tensor:
    """This rank's rows."""
    at, mesh = spread.placement, mesh_of(spread.group)
    local = count(layout_of(spread.layout, at.length, mesh.size).ranges(mesh.rank))
    rows: Tensor = ops.scatter(whole, at.dim, at.outer, at.length, at.inner, local, spread.layout, spread.group)
    return rows


def lying_as(like: Tensor, rows: Tensor) -> Tensor:
    """`rows` with the strides of `like`: a program that was compiled for those is run again."""
    if rows.stride() == like.stride() or any(step == 0 for step in like.stride()):
        return rows
    return torch.empty_strided(like.size(), like.stride(), dtype=rows.dtype, device=rows.device).copy_(rows)


# How many shards were made, by mesh and rank: all ranks make the same in the same order, so it names them.
_made: WeakKeyDictionary[Mesh, dict[int, int]] = WeakKeyDictionary()


class Shard:
    """This rank's rows of a tensor, and the whole once somebody has read it. Aliases of a `Lazy` share it."""

    def __init__(self, rows: Tensor, spread: Spread, number: int | None = None):
        self.spread, self.number = spread, number
        self._rows, self._whole = rows, None
        if number is None and is_real(rows):
            mesh = mesh_of(spread.group)
            mesh.apart()  # made here, where all ranks are
            made = _made.setdefault(mesh, {})
            self.number = made[mesh.rank] = made.get(mesh.rank, 0) + 1

    _whole: Tensor | None

    @property
    def rows(self) -> Tensor:
        if self._whole is None:
            return self._rows
        # The whole may have been written since, through a view too: views made below autograd count no writes.
        with unset_fake_temporarily():
            return lying_as(self._rows, cut(self.spread, self._whole))

    def mapped(self, func: Callable[[Tensor], Tensor]) -> Shard:
        """An op that looks at each entry alone, on the rows."""
        rows = func(self._rows)
        return Shard(rows, replace(self.spread, name=f"{self.spread.name} as {rows.dtype}"), self.number)

    @property
    def is_read(self) -> bool:
        return self._whole is not None

    def read(self) -> Tensor:
        """The whole. Raises RingMismatchError where the ranks read different tensors, RingCommError where not all
        read."""
        if self._whole is not None:
            return self._whole
        mesh = mesh_of(self.spread.group)
        apart = mesh.apart()
        if not is_real(self._rows):  # a graph is being made
            return gathered(self.spread, self._rows, apart.name)
        self._meet(apart)
        with torch.no_grad():
            self._whole = gathered(self.spread, self._rows, apart.name)
        return self._whole

    def _meet(self, mesh: Mesh) -> None:
        name, rank = self.spread.name, mesh.rank
        sentence = f"rank {rank} reads {name} and waits for the other ranks, which have to read it too"
        timer = threading.Timer(PATIENCE, log.warning, (sentence,))
        timer.daemon = True
        timer.start()
        try:
            header = torch.tensor([self.number or 0, *digest(name.encode())], device=mesh.device)
            headers = mesh.all_gather(header, f"read {name}")
        except RingCommError as error:
            raise RingCommError(
                f"rank {rank} read {name}, whose rows are spread over {mesh.size} ranks, and not all of them read it. "
                "With outputs='lazy' all ranks read an output or none: read it before `if rank == 0`, or leave the "
                f"option at outputs='gather'. {error}"
            ) from error
        finally:
            timer.cancel()
        if not all(torch.equal(headers[0], other) for other in headers):
            numbers = [int(other[0]) for other in headers]
            raise RingMismatchError(
                f"the ranks read different tensors at the same time: rank {rank} reads {name}, and of all tensors that "
                f"were left on their ranks, ranks 0 to {mesh.size - 1} read numbers {numbers}. All ranks read the same "
                "outputs in the same order, or leave the option at outputs='gather'"
            )


def is_real(x: Tensor) -> bool:
    """Not one of the stand-ins that a graph is made with."""
    return type(x) in (Tensor, torch.nn.Parameter)


class Lazy(Tensor):
    """See the module. `isinstance(x, torch.Tensor)` holds, `type(x) is torch.Tensor` does not; numpy, pickle, copies
    and pointers are those of the whole; a graph compiled by ringopt takes the rows as they are."""

    shard: Shard

    @staticmethod
    def __new__(cls, shard: Shard) -> Lazy:
        spread, rows = shard.spread, shard._rows
        made: Lazy = make_wrapper(cls, spread.size, spread.stride, rows.dtype, rows.device)
        made.shard = shard
        return made

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    @disable_dynamo  # it is called from code that Dynamo watches
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, Lazy) and is_alias(func, args):
            return Lazy(first.shard)
        if isinstance(first, Lazy) and not first.shard.is_read and is_by_entry(func, kwargs or {}):
            return Lazy(first.shard.mapped(lambda rows: func(rows, *args[1:], **(kwargs or {}))))
        read: dict[int, Lazy] = {}

        def opened(x: Lazy) -> Tensor:
            whole = x.shard.read()
            read[id(whole)] = x
            return whole

        args, kwargs = tree_map_only(Lazy, opened, (tuple(args), kwargs or {}))
        # What an op that writes returns is the tensor it wrote.
        return tree_map_only(Tensor, lambda out: read.get(id(out), out), func(*args, **kwargs))

    # ---- what reads the memory, past the dispatcher ------------------------------------------------------------------
    def numpy(self, *, force: bool = False) -> Any:
        return whole(self).numpy(force=force)

    def tolist(self) -> Any:
        return whole(self).tolist()

    def data_ptr(self) -> int:
        return self.shard.read().data_ptr() if is_real(self.shard.rows) else 0

    def __dlpack__(self, **kwargs: Any) -> Any:
        return whole(self).__dlpack__(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._leaf() if self.is_leaf else whole(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._leaf().__reduce_ex__(protocol)

    def _leaf(self) -> Tensor:
        return self.shard.read().detach().requires_grad_(self.requires_grad)

    # ---- as an input of somebody's compiled graph --------------------------------------------------------------------
    @property
    def _rows(self) -> Tensor:
        return self.shard.rows

    def __tensor_flatten__(self) -> tuple[list[str], Spread]:
        return ["_rows"], self.shard.spread

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], spread: Spread, size: Any, stride: Any) -> Lazy:
        return Lazy(Shard(inner["_rows"], spread, 0))


def is_alias(func: Any, args: Sequence[Any]) -> bool:
    """Whether an op returns its operand unchanged: detach, alias, or a view of the same sizes."""
    same_size = func is aten.view.default and list(args[1]) == list(args[0].shape)
    return same_size or func in (aten.detach.default, aten.alias.default)


def is_by_entry(func: Any, kwargs: dict[str, Any]) -> bool:
    """A copy, perhaps to another dtype."""
    return func is aten.clone.default or (func is TO_COPY and set(kwargs) <= {"dtype"})


# ---- from rows to a lazy tensor, and back ----------------------------------------------------------------------------
class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, spread: Spread) -> Lazy:
        ctx.spread = spread
        return Lazy(Shard(rows.detach(), spread))

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if isinstance(grad, Lazy) and same_rows(grad.shard.spread, ctx.spread):
            return grad.shard.rows, None
        return cut(ctx.spread, grad), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Lazy) -> Tensor:
        ctx.spread = x.shard.spread
        return x.shard.rows.detach()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Lazy(Shard(grad.contiguous(), replace(ctx.spread, name=f"the gradient of {ctx.spread.name}")))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Lazy) -> Tensor:
        return x.shard.read().detach()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def spread(rows: Tensor, how: Spread) -> Tensor:
    """The whole tensor of which every rank passes its rows; differentiable."""
    made: Tensor = _Spread.apply(rows, how)  # type: ignore[no-untyped-call]
    return made


def local_rows(x: Lazy) -> Tensor:
    """This rank's rows; differentiable: their gradient is a lazy one."""
    rows: Tensor = _Rows.apply(x)  # type: ignore[no-untyped-call]
    return rows


def whole(x: Lazy) -> Tensor:
    """The plain whole tensor; differentiable."""
    plain: Tensor = _Whole.apply(x)  # type: ignore[no-untyped-call]
    return plain
