"""What is remembered of code from one trace by Dynamo to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch._C._dynamo import eval_frame
from torch._dynamo import convert_frame, pgo

__all__ = ["Remembered", "processes", "traced_apart"]

C = TypeVar("C")


class Remembered(Generic[C]):
    """A collection by code: one for each number of processes, for a process that traced alone before the others joined
    it, or in a dry run, must know afterwards what they know.

        left = Remembered(WeakSet[CodeType])
        left().add(code)
    """

    def __init__(self, empty: Callable[[], C]):
        self.empty = empty

    def __call__(self) -> C:
        memory = _apart[-1][1] if _apart else _memories.setdefault(processes(), {})
        if self not in memory:
            memory[self] = self.empty()
        return memory[self]  # type: ignore[no-any-return]


Memory = dict[Remembered[Any], Any]

_memories: dict[int, Memory] = {}
_apart: list[tuple[int, Memory]] = []


def processes() -> int:
    """How many there are that trace the same, or that a dry run is for."""
    if _apart:
        return _apart[-1][0]
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def traced_apart(number: int) -> Iterator[None]:
    """A dry run, as if there were `number` processes. What is remembered within is forgotten behind it, by Dynamo too:
    which sizes have changed since it saw them first, how often it compiled a function, and all of one that it had not
    seen before."""
    sizes, first_sizes, seen = pgo._CODE_STATE, pgo._INIT_CODE_STATE, convert_frame.input_codes
    compilations, known = convert_frame.FRAME_COMPILE_COUNTER.copy(), len(seen.seen)
    pgo._CODE_STATE = deepcopy(sizes)
    _apart.append((number, {}))
    try:
        yield
    finally:
        _apart.pop()
        pgo._CODE_STATE, pgo._INIT_CODE_STATE = sizes, first_sizes
        convert_frame.FRAME_COMPILE_COUNTER.clear()
        convert_frame.FRAME_COMPILE_COUNTER.update(compilations)
        for code in [found for each in seen.seen[known:] if (found := each()) is not None]:
            seen.seen_ids.discard(id(code))
            eval_frame.reset_code(code)
        del seen.seen[known:]
