"""Mutual exclusion: one thread of the program at a time may use a mesh.

Messages are matched by order alone, so two threads that send through one mesh at a time may receive each other's data,
without an error. A thread is inside a mesh during a compiled call, an operator that communicates, and a backward from
its first message to its end. The threads in which the autograd engine runs a backward, and the recomputation of
checkpoints in them, belong to the thread that called it.
"""

from __future__ import annotations

import threading
import weakref
from typing import cast

from ringopt.errors import RingThreadError
from ringopt.torch_compat.autograd import at_end_of_backward, current_backward, of_strand

# The engine propagates torch's thread-local objects to the threads that run a backward.
KEY = "ringopt strand"

CROWD = (
    "were inside the mesh at the same time (a call of what was compiled, its backward, or an operator of ringopt). "
    "Their messages cannot be told apart, so no number of either can be trusted. Call from one thread at a time, in "
    "the same order on all ranks; or give each model a mesh of its own, options={'mesh': DeviceMesh.from_group(group, "
    "'cpu', mesh_dim_names=(name,))}, with a group that torch.distributed.new_group has made and a name that no other "
    "mesh has (Dynamo takes meshes of the same ranks and names for one), and call each once before the threads start. "
    "Restart the ranks"
)


class Strand:
    """A thread of the program, with the threads of the autograd engine that work for it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread().name


# By backward, for callers that have no strand yet for the threads of the engine to inherit.
_of_backwards: weakref.WeakValueDictionary[int, Strand] = weakref.WeakValueDictionary()


def strand() -> Strand:
    """The strand of the calling thread."""
    return cast(Strand, of_strand(KEY, _new_strand))


def _new_strand() -> Strand:
    backward = current_backward()
    return Strand() if backward is None else _of_backwards.setdefault(backward, Strand())


class Occupancy:
    """The occupancy of one mesh. `crowded`: the error message once two threads have been inside at a time, else ""."""

    def __init__(self) -> None:
        self.crowded = ""
        self._inside: Strand | None = None
        self._depth = 0
        self._backwards: dict[int, Strand] = {}
        self._lock = threading.RLock()  # reentrant: the end of a backward that failed comes whenever it is freed

    def enter(self) -> Strand | None:
        """Enters, and returns None; if another strand is inside, returns that and does not enter."""
        mine, task = strand(), current_backward()
        with self._lock:
            if self._inside is not None and self._inside is not mine:
                return self._inside
            self._inside, self._depth = mine, self._depth + 1
            if task is None or task in self._backwards:
                return None
            self._backwards[task] = mine
            self._depth += 1
        at_end_of_backward(_End(self, task))
        return None

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._inside = None

    def check(self) -> None:
        """Raises RingThreadError once two threads have been inside at a time."""
        if self.crowded:
            raise RingThreadError(self.crowded)

    def end_backward(self, task: int) -> None:
        with self._lock:
            if self._backwards.pop(task, None) is not None:
                self.leave()


class _End:
    """Called by the engine at the end of a backward; where that fails it is freed without a call, which ends it too."""

    def __init__(self, occupancy: Occupancy, task: int):
        self._occupancy = occupancy
        self._end = weakref.finalize(self, occupancy.end_backward, task)
        self._end.atexit = False

    def __call__(self) -> None:
        self._end()
        self._occupancy.check()
