"""torch's associative_scan as one node: for backend="ring", Dynamo is given torch's scan in its place.

    ys = associative_scan(combine, xs, dim)     ->     ys = cat([xs[:1], scan(combine, xs[0], xs[1:])])

In combine_mode="generic" Dynamo writes the recursion out, inside vmap: more nodes for every doubling of the sequence,
in which no recurrence is to be seen. Combined one after the other, the step is a graph, which find_scan reads. What is
registered with Dynamo holds for the whole process, so it asks who compiles: all other backends have what they had, and
so has a program that is left as it is, which Dynamo traces once more for that: Inductor compiles no gradient of torch's
scan on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from ringopt.output.printable import logger
from ringopt.torch_compat.dynamo import (
    ASSOCIATIVE_SCAN,
    SCAN,
    TraceOtherwise,
    backends_compiling,
    frame_being_compiled,
)
from ringopt.torch_compat.dynamo_memory import Remembered
from ringopt.torch_compat.pytree import tree_flatten, tree_unflatten

log = logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
MARK = "associative_scan_is_one_node"


def keeps_associative_scans(backend: F) -> F:
    """Marks a backend that reads torch's scan."""
    setattr(backend, MARK, True)
    return backend


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def kept_by_the_backend() -> bool:
    """Whether it is a marked one that Dynamo traces for. Dynamo runs this when it traces."""
    frame = frame_being_compiled()
    kept = any(getattr(backend, MARK, False) for backend in backends_compiling()) and frame not in _as_written()
    if kept:
        _kept().add(frame)
    return kept


_kept, _as_written = Remembered(WeakSet[CodeType]), Remembered(WeakSet[CodeType])


def trace_as_written() -> None:
    """To be called in a backend that leaves its graph as it is: has Dynamo trace the frame again if there are such
    scans in it."""
    frame = frame_being_compiled()
    if frame in _kept() and frame not in _as_written():
        _as_written().add(frame)
        raise TraceOtherwise


# The same code, which is not substituted.
unrolled = FunctionType(
    ASSOCIATIVE_SCAN.__code__,
    ASSOCIATIVE_SCAN.__globals__,
    ASSOCIATIVE_SCAN.__name__,
    ASSOCIATIVE_SCAN.__defaults__,
    ASSOCIATIVE_SCAN.__closure__,
)


def associative_scan(
    combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """What Dynamo traces. What has no second row, or is none, is left to torch, and so are its errors."""
    leaves, spec = tree_flatten(xs)
    if not kept_by_the_backend() or not leaves or any(x.ndim <= dim or x.shape[dim] < 2 for x in leaves):
        return unrolled(combine_fn, xs, dim, reverse, combine_mode)
    rows = [x.movedim(dim, 0) for x in leaves]
    if reverse:
        rows = [x.flip([0]) for x in rows]

    def step(carry: Any, row: Any) -> Any:
        new, _ = tree_flatten(combine_fn(tree_unflatten(list(carry), spec), tree_unflatten(list(row), spec)))
        return tuple(new), tuple(x.clone() for x in new)

    _, ys = SCAN(step, tuple(x[0].clone() for x in rows), tuple(x[1:] for x in rows))
    found = [torch.cat([x[:1], y]) for x, y in zip(rows, ys)]  # noqa: B905 (Dynamo)
    if reverse:
        found = [x.flip([0]) for x in found]
    return tree_unflatten([x.movedim(0, dim) for x in found], spec)


def teach_associative_scan() -> None:
    """Registers it with Dynamo, which takes one form of a function, of the same signature."""
    try:
        torch.compiler.substitute_in_graph(ASSOCIATIVE_SCAN)(associative_scan)
    except (TypeError, ValueError) as error:
        log.warning("torch's associative_scan is written out by Dynamo, and no recurrence is found in it: %s", error)
