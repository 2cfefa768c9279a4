"""The mesh over a process group of torch.distributed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringopt.distributed import failure_agreement
from ringopt.distributed.failure_agreement import Place, all_alike
from ringopt.distributed.groups import met_group
from ringopt.distributed.intra_node.collectives import LocalCollectives
from ringopt.distributed.intra_node.discovery import Met, find_neighbours
from ringopt.distributed.intra_node.messages import LocalLinks
from ringopt.distributed.mesh import Mesh, Transfer, Work, register
from ringopt.distributed.occupancy import CROWD, Occupancy
from ringopt.distributed.standing import PATIENCE, Call, differences
from ringopt.distributed.standing import publish as publish_call
from ringopt.distributed.tensor_digest import bytes_in_order
from ringopt.errors import RingCommError, RingMismatchError, RingThreadError
from ringopt.torch_compat.distributed import (
    all_gather_single,
    bound_device,
    carries_nothing,
    device_types,
    sends_in_batches,
    store_of,
)
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

T = TypeVar("T")

Messages: TypeAlias = Sequence[tuple[int, Tensor]]  # peer, 1-D buffer


@dataclass(frozen=True)
class Far:
    """A message of the process group. While it is waited for, messages between ranks of this node are served: a peer
    may wait for one of them before it sends this."""

    work: Work
    links: LocalLinks

    def wait(self) -> None:
        with self.links.attended():
            self.work.wait()


class ProcessMesh(Mesh):
    """Ranks of one process group, numbered as in `ranks` (global ranks). The group belongs to the mesh: its timeout
    holds for ringopt's messages only, and their order is their own. Between ranks of one node, CPU tensors bypass the
    group (distributed/intra_node/messages.py)."""

    def __init__(self, name: str, ranks: Sequence[int], timeout: float, group: Any, named_by: str = ""):
        super().__init__()
        self._name, self.ranks, self.timeout, self.group = name, tuple(ranks), timeout, group
        self._rank = self.ranks.index(dist.get_rank())
        # The world that the group belongs to: torch.distributed may be shut down and started again.
        self.world = dist.group.WORLD
        types = device_types(group)
        self.device = torch.device("cpu" if "cpu" in types or not types else types[0])
        self._met: set[torch.device] = set()  # on which all ranks have met
        self._apart: ProcessMesh | None = None
        self._process = os.getpid()
        self._ended, self._written = "", ""  # why the mesh was aborted, and where the last events are
        self._occupancy = Occupancy()
        self._place, self._cuts, self._life = Place(), 0, self._lives()
        self._links: LocalLinks | None = None
        met = self._meet(f"{name} {named_by}")
        self._links, self._strangers = met.links, met.strangers
        self._together = LocalCollectives(met.links, self._rank) if met.links and met.everybody else None
        if (bound := bound_device(dist.group.WORLD)) is not None:
            self.meet_on(bound)

    @property
    def _store(self) -> Any:
        """The store of the group; None where nothing is communicated."""
        if self.size == 1 or carries_nothing(self.group):
            return None
        return store_of(self.group)

    @property
    def _store_key(self) -> str:
        return f"{self._name} {self._life}"

    def _lives(self) -> int:
        """How often this rank has made this mesh with this store, which may outlive torch.distributed; equal on all
        ranks."""
        if carries_nothing(self.group):
            return 0
        return store_of(self.group).add(f"ringopt {self._name} {self._rank}", 1)

    def _meet(self, made: str) -> Met:
        """Finds the ranks of this node; collective. Raises RingMismatchError where ranks make different meshes, by
        `made`."""
        if self.size == 1 or self.device.type != "cpu" or carries_nothing(self.group):
            return Met(None, False)
        with unset_fake_temporarily():  # a mesh may be made while a graph is traced
            if len(set(self._of_all(_text_hash(made)))) > 1:
                raise RingMismatchError(
                    f"rank {self.rank} of {self.size} makes mesh {self._name!r}, and others make another mesh of the "
                    "same ranks. Threads have meshes of their own made in one order on all ranks: call each model "
                    "once, one after the other, before the threads start"
                )
            met = find_neighbours(self._rank, self._of_all, self.timeout)
        if met.links is not None:
            weakref.finalize(self, met.links.close)
        return met

    def meet_on(self, device: torch.device) -> None:
        if self.size == 1 or device.type not in device_types(self.group):
            return
        if device.index is None and device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        if device in self._met:
            return
        self._met.add(device)
        if self.device.type == device.type != "cpu":
            self.device = device
        if device.type == "cpu" or carries_nothing(self.group) or not sends_in_batches(self.group, device):
            return
        # A batch of messages that is the first call of a communicator has to be one of all ranks.
        with unset_fake_temporarily(), self.held():
            self._all_reduce(torch.zeros(1, device=device), "meeting")

    def _of_all(self, mine: bytes) -> list[bytes]:
        """All-gather of bytes through the group, in rank order."""
        brought = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")  # whatever the default device is
        parts = [torch.empty_like(brought) for _ in self.ranks]
        self._guarded("meeting", "all_gather", lambda: dist.all_gather(parts, brought, group=self.group))
        return [bytes(part.tolist()) for part in parts]

    @property
    def name(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def gathers_in_place(self) -> bool:
        return self._together is not None

    @property
    def remark(self) -> str:
        if not self._strangers:
            return ""
        return (
            f"messages between rank {self.rank} and {len(self._strangers)} of the ranks on its machine go through "
            "gloo: they may not read each other's memory, for they are of other users or network namespaces, or the "
            "system forbids it (`ringopt doctor`)"
        )

    @property
    def usable(self) -> bool:
        """False once torch.distributed was shut down, also if it was started again since."""
        return dist.is_initialized() and dist.group.WORLD is self.world

    def apart(self) -> Mesh:
        if self._apart is None:
            group = met_group(f"{self._name} apart", self.ranks, self.timeout)
            self._apart = ProcessMesh(f"{self._name} apart", self.ranks, self.timeout, group)
            register(self._apart)
        return self._apart

    def failed(self, label: str, what: str, begin: float, error: RuntimeError) -> RingCommError:
        first = not self._ended
        self.end("an earlier message has failed")
        if self._occupancy.crowded:
            return RingThreadError(self._occupancy.crowded)
        message = super().failed(label, what, begin, error)
        # After a timeout the peers are alive, and publish their calls now; a peer that is gone publishes nothing.
        patience = PATIENCE if "timed out" in str(error).lower() else 0.0
        return RingCommError(
            " ".join(filter(None, (f"{message}.", self._differences(patience if first else None), f"{self._written}.")))
        )

    def _differences(self, patience: float | None) -> str:
        """How the calls of the ranks differ, a sentence for the error; "" without `patience`."""
        if patience is None or self._store is None:
            return ""
        text = differences(self._store, self._store_key, self._rank, self.size, self.recent.call, patience)
        return f"{text}." if text else ""

    def stands(self, call: Call, publish: bool = False) -> None:
        super().stands(call)
        if publish and self._store is not None:
            try:
                publish_call(self._store, self._store_key, self._rank, call)
            except RuntimeError as error:
                raise self.failed("", "telling where this rank stands", time.monotonic(), error) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        if (other := self._occupancy.enter()) is not None:
            self._end_crowded(other.thread)
        try:
            yield
        finally:
            self._occupancy.leave()
        self._occupancy.check()  # the thread that came meanwhile may be the one that the peers have answered

    def _end_crowded(self, other: str) -> NoReturn:
        who = f"threads {other!r} and {threading.current_thread().name!r}"
        self._occupancy.crowded = (
            self._occupancy.crowded or f"rank {self.rank} of {self.size} ({self.name}): {who} {CROWD}"
        )
        self.end(f"{who} were inside the mesh at the same time")
        raise RingThreadError(self._occupancy.crowded)

    def begin_program(self) -> None:
        self._place.programs += 1

    def cut_short(self, why: str, kind: str, later: bool = False) -> None:
        goes_on = False
        self.backwards.clear()
        try:
            goes_on = bool(kind) and not self._ended and self._all_cut_short(kind, later)
        finally:  # an interrupt comes twice
            if not goes_on:
                self.end(why)

    def _all_cut_short(self, kind: str, later: bool) -> bool:
        """Whether all ranks failed at the same message; messages in flight have then arrived."""
        self._cuts += 1
        self._place.error = kind
        name, store = (
            f"{self._name} {self._life} {self._cuts}",
            store_of(self.group),
        )
        patience = failure_agreement.PATIENCE_LATER if later else failure_agreement.PATIENCE
        if not all_alike(store, name, self._rank, self.size, self._place, self.attend, patience):
            return False
        try:
            for pending in list(self.in_flight):
                pending.wait()
        except RingCommError:
            return False
        return True

    def end(self, why: str) -> None:
        """Aborts the mesh on this rank, and signals the ranks of its node."""
        # The ranks are out of step: the next message would be received in the place of another.
        if not self._ended:
            self._ended, self._written = why, self.recent.write(self._name, self._rank, why)
        if self._links is not None:
            self._links.fail()

    def attend(self) -> None:
        if self._links is not None:
            self._links.attend()

    def _post(self, sends: Messages, receives: Messages, label: str) -> list[Transfer]:
        # Both ends of a message decide alike: its buffers are on devices of one type.
        near_sends, far_sends = self._split(sends)
        near_receives, far_receives = self._split(receives)
        with self._place.posting([peer for peer, _ in sends], [peer for peer, _ in receives]):
            far = self._post_far(far_sends, far_receives, label) if far_sends or far_receives else []
            # In the order in which they are waited for: waiting for the group serves no message of the node, and no
            # peer may still wait for this rank to read one of the same exchange.
            return [*self._post_near(near_sends, near_receives, label), *far]

    def _split(self, messages: Messages) -> tuple[Messages, Messages]:
        """Messages to ranks of this node whose memory can be read, and the others."""
        lines = self._links.lines if self._links is not None else ()
        near: list[tuple[int, Tensor]] = []
        far: list[tuple[int, Tensor]] = []
        for peer, buffer in messages:
            (near if peer in lines and buffer.device.type == "cpu" else far).append((peer, buffer))
        return near, far

    def _post_near(self, sends: Messages, receives: Messages, label: str) -> list[Transfer]:
        if self._links is None:
            return []
        self._guarded(label, "exchange", lambda: None)
        posted = [(_received(x, peer), self._links.receive(peer, x)) for peer, x in receives]
        posted += [(_sent(x, peer), self._links.send(peer, x)) for peer, x in sends]
        return [Transfer(what, work) for what, work in posted]

    def _post_far(self, sends: Messages, receives: Messages, label: str) -> list[Transfer]:
        # batch_isend_irecv posts in the order of this list on gloo, and all at once on NCCL, where receives posted
        # alone would wait on the stream for sends that stand behind them.
        ops = [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer) for peer, buffer in receives]
        ops += [dist.P2POp(dist.isend, buffer, group=self.group, group_peer=peer) for peer, buffer in sends]
        whats = [_received(buffer, peer) for peer, buffer in receives] + [_sent(buffer, peer) for peer, buffer in sends]
        works = self._guarded(label, ", ".join(whats), lambda: dist.batch_isend_irecv(ops))
        if len(works) != len(ops):
            whats = [", ".join(whats)] * len(works)
        return [Transfer(what, self._far(work)) for what, work in zip(whats, works, strict=True)]

    def _far(self, work: Work) -> Work:
        return Far(work, self._links) if self._links is not None else work

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        if not x.numel():
            return [torch.empty_like(x) for _ in self.ranks]
        parts, transfer = self._start_all_gather(x, label)
        self._guarded(label, transfer.what, transfer.work.wait)
        return parts

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        # As bytes: gloo gathers no bool and no complex numbers.
        mine = bytes_in_order(x)
        whole = mine.new_empty(self.size * mine.numel())
        parts = whole.split(mine.numel())
        what = f"all_gather of {x.nbytes} bytes with global ranks {self.ranks}"
        with self._place.posting(collectives=1):
            work = self._guarded(label, what, lambda: self._gather(mine, whole, parts))
        return [part.view(x.dtype).view(x.shape) for part in parts], Transfer(what, work)

    def _gather(self, mine: Tensor, whole: Tensor, parts: Sequence[Tensor]) -> Work:
        if self._together is not None and mine.device.type == "cpu":
            parts[self._rank].copy_(mine)
            return self._together.gather(dict(enumerate(parts)))
        return self._far(all_gather_single(whole, mine, group=self.group, async_op=True))

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        transfer = self._start_all_reduce(total, label)
        self._guarded(label, transfer.what, transfer.work.wait)
        return total

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        what = f"all_reduce of {x.nbytes} bytes with global ranks {self.ranks}"
        with self._place.posting(collectives=1):
            return Transfer(what, self._guarded(label, what, lambda: self._reduce(x)))

    def _reduce(self, x: Tensor) -> Work:
        if self._together is not None and x.device.type == "cpu":
            return self._together.sum(x.view(-1))
        return self._far(dist.all_reduce(x, group=self.group, async_op=True))

    def _guarded(self, label: str, what: str, call: Callable[[], T]) -> T:
        if os.getpid() != self._process:
            raise RingCommError(
                f"mesh {self._name!r} belongs to process {self._process}, and this is process {os.getpid()}, forked "
                "from it, which is no rank. Call what was compiled in the process of the rank"
            )
        if not self.usable:
            raise RingCommError(
                f"mesh {self._name!r} belongs to a process group that was destroyed; make it again with "
                "ringopt.distributed.lookup.process_mesh. A compiled model is compiled anew, over the process group "
                "that there is then or on one process, after dynamo.reset()"
            )
        self._occupancy.check()
        if self._ended:
            raise RingCommError(
                f"rank {self.rank} of {self.size} ({self.name}), {label or 'exchange'}: {what} was not begun: "
                f"{self._ended}, and the ranks are not at the same message any more. Restart the ranks. "
                f"{self._written}"
            )
        begin = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            raise self.failed(label, what, begin, error) from error


def _text_hash(text: str) -> bytes:
    """16 bytes, for any length of text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _received(buffer: Tensor, peer: int) -> str:
    return f"receive of {buffer.nbytes} bytes from rank {peer}"


def _sent(buffer: Tensor, peer: int) -> str:
    return f"send of {buffer.nbytes} bytes to rank {peer}"
