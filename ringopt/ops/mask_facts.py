"""`ringopt::mask_facts`: what a mask reads, on its way to the host, for all attentions that read the same values.

    facts = mask_facts(sources)                      begins the copy; a number in a tensor (int64, on the CPU)
    ring_attention(..., sources, ..., facts=facts)   and its backward read it there

Values of a graph are told apart by the graph, so a mask that is written between two layers has two of these. Memory and
counts of writes would not tell: compiled code writes one value where another was.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.executor.operands import Operands
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled

_known: dict[int, tuple[MaskFacts, StorageWeakRef]] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()  # the backward of an accelerator runs in a thread of the autograd engine


@torch.library.custom_op(
    "ringopt::mask_facts", mutates_args=(), tags=ON_HOST, schema="(Tensor[] sources) -> Tensor facts"
)
def mask_facts(sources: Sequence[Tensor]) -> Tensor:
    """A ticket for what the host is going to know of `sources`: that is forgotten when the ticket is freed."""
    facts, ticket = MaskFacts(sources), torch.tensor(next(_numbers), device="cpu")
    with _lock:
        for number in [number for number, (_facts, gone) in _known.items() if gone.expired()]:
            del _known[number]
        _known[int(ticket)] = facts, StorageWeakRef(ticket.untyped_storage())
    return ticket


@mask_facts.register_fake
def _(sources: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _no_gradient(ctx: Any, dticket: Tensor) -> Any:
    return [None] * ctx.sources if ctx.sources else []


def _count_sources(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sources = len(inputs[0])


mask_facts.register_autograd(never_compiled(_no_gradient), setup_context=_count_sources)


def with_facts(given: Operands, ticket: Tensor | None) -> Operands:
    """With what `ticket` stands for. Without one, or where it was copied and the first one freed, that begins anew."""
    with _lock:
        known = _known.get(int(ticket)) if ticket is not None else None
    return replace(given, facts=known[0] if known is not None else MaskFacts(given.sources))
