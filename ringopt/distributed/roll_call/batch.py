"""Do all ranks call with the same batch? Each call brings a digest of its inputs, which travels beside its compute.

`begin_batch` starts the message when the call begins. It is waited for before the first other message of the call, so
no rank waits for it that has something to compute, and none sends anything of a call in which the ranks differ. A
device is not waited for at all: what has arrived is read when the next call begins.

What a compiled graph has returned, or written, is not read again when it comes back (a cache of keys and values grows
with every call): it is known by which call has made it. Ranks that differ in that, and hold their inputs still, look
at their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.consistency import ADVICE, digest, texts_of_all
from ringopt.distributed.mesh import Mesh, Pending
from ringopt.distributed.roll_call.entrance import (
    ASIDE,
    FREE,
    WIDTH,
    check_begun,
    header,
    judge_later,
    on_host,
    settle_late,
)
from ringopt.distributed.tensor_digest import MODULUS, STEP, signed, word_of
from ringopt.errors import RingMismatchError
from ringopt.hardware.to_host import to_host

LABEL = "inputs"


@dataclass(frozen=True)
class Batch:
    """`inputs` of a call of `program`, and `texts` of what the host knows of them; `made`, by place, digests of where
    inputs come from that are not read."""

    program: int
    names: Sequence[str]
    inputs: Sequence[Any]
    texts: Sequence[str]
    made: dict[int, int]

    @classmethod
    def of(cls, program: int, names: Sequence[str], inputs: Sequence[Any], made: dict[int, int]) -> Batch:
        """The batch, with the texts of its inputs."""
        return cls(program, names, inputs, [described(x) for x in inputs], made)


def described(value: Any) -> str:
    """Shape and dtype of a tensor, or the value of what is none."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def begin_batch(mesh: Mesh, batch: Batch) -> None:
    """All ranks together. Raises RingMismatchError, on all ranks alike, then or before the next message of this call;
    from a device at what is begun next."""
    settle_late(mesh)
    parts, pending = mesh.start_all_gather(words_of(mesh, batch), LABEL)
    mesh.due_before_message(partial(settle_batch, mesh, batch, parts, pending))


def slot_of(place: int) -> int:
    """The word in which an input counts; the last is for all that have none of their own."""
    return min(FREE + place, WIDTH - 1)


def words_of(mesh: Mesh, batch: Batch) -> Tensor:
    """The message of this rank, int64 [WIDTH]: what is begun, which words stand for inputs not read, the digests."""
    host, read, aside = [0] * WIDTH, list[tuple[int, Tensor]](), 0
    for place, (value, text) in enumerate(zip(batch.inputs, batch.texts, strict=True)):
        slot, made = slot_of(place), batch.made.get(place)
        host[slot] = host[slot] * STEP + digest(f"{text} {made}".encode())[0]
        if made is not None:
            aside |= 1 << slot
        elif isinstance(value, Tensor) and value.numel():
            read.append((slot, word_of(value) * signed(pow(STEP, 2 * place + 1, MODULUS))))
    words = header(mesh, batch.program, aside, [signed(word) for word in host[FREE:]])
    for slot, word in read:
        words[slot] += word.to(words.device)
    return words


def settle_batch(mesh: Mesh, batch: Batch, parts: Sequence[Tensor], pending: Pending) -> None:
    """Waits for the message and judges it; from a device, leaves that to the next call. Raises RingMismatchError."""
    pending.wait()
    if on_host(mesh):
        judge_batch(mesh, batch, [part.tolist() for part in parts], at_hand=True)
        return
    found = without_waiting(torch.stack(list(parts)))
    known = replace(batch, inputs=())  # their memory is not held
    judge_later(mesh, lambda: judge_batch(mesh, known, found(), at_hand=False))


def without_waiting(x: Tensor) -> Callable[[], Any]:
    """Brings `x` from a device to the host; what is returned waits until it is there, and gives its numbers."""
    arrived = to_host([x])
    return lambda: arrived()[0].tolist()


def judge_batch(mesh: Mesh, batch: Batch, found: Sequence[Sequence[int]], at_hand: bool) -> None:
    """`at_hand`: the inputs are still what they were. Raises RingMismatchError where the ranks `found` unlike words."""
    check_begun(mesh, found)
    odd = slots_apart(found)
    unread = sum(1 << slot for slot in odd if any(words[ASIDE] >> slot & 1 for words in found))
    if unread and at_hand:
        read = words_of(mesh, replace(batch, made={}))
        found = [part.tolist() for part in mesh.all_gather(read, LABEL)]
        odd = slots_apart(found)
    elif unread:  # equal numbers may have come by different ways, and they are gone
        odd = [slot for slot in odd if not unread >> slot & 1]
    if odd:
        raise RingMismatchError(difference(mesh, batch, found, odd))


def slots_apart(found: Sequence[Sequence[int]]) -> list[int]:
    """The words of inputs in which the messages of the ranks differ."""
    return [slot for slot in range(FREE, WIDTH) if len({words[slot] for words in found}) > 1]


def difference(mesh: Mesh, batch: Batch, found: Sequence[Sequence[int]], odd: Sequence[int]) -> str:
    """The sentence of the error: which inputs differ, on which ranks, and how. All ranks together."""
    texts = [json.loads(text) for text in texts_of_all(mesh, json.dumps(batch.texts), LABEL)]
    sentences = []
    for slot in odd:
        places = [place for place in range(len(batch.texts)) if slot_of(place) == slot]
        ranks = [rank for rank, words in enumerate(found) if words[slot] != found[0][slot]]
        unlike = [place for place in places if any(texts[rank][place] != texts[0][place] for rank in ranks)]
        which = " or ".join(batch.names[place] for place in unlike or places)
        held = "; ".join(
            f"rank {rank}: {texts[rank][place]}, rank 0: {texts[0][place]}"
            for place in unlike
            for rank in ranks
            if texts[rank][place] != texts[0][place]
        )
        sentences.append(f"{which} on ranks {ranks} ({held or f'other numbers in {texts[0][places[0]]}'})")
    found_apart = "; ".join(sentences)
    return f"inputs differ from those of rank 0, which they did not in an earlier call: {found_apart}. {ADVICE}"
