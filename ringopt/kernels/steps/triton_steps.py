"""All steps of a recurrence in one launch, by the text of by_element.py. Imported where Triton is at hand only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ringopt.kernels.score_program import function_of

BLOCK = 256


def run(
    program: str, carried: Sequence[Tensor], rows: Sequence[Tensor], consts: Sequence[Tensor], into: Sequence[Tensor],
    backwards: bool,
) -> list[Tensor]:
    """The last carries; `into` is filled, for each output of the step. A carry that is not kept goes anywhere."""
    carried, sizes, count = [x.contiguous() for x in carried], tuple(carried[0].shape), rows[0].shape[0]
    last = [torch.empty_like(x) for x in carried]
    at_rows = tuple((x.stride(0), *x[0].expand(sizes).stride()) for x in rows)
    at_consts = tuple(x.expand(sizes).stride() for x in consts)
    first, order, total = (count - 1, -1, carried[0].numel()) if backwards else (0, 1, carried[0].numel())
    tensors = {"carries": carried, "rows": rows, "consts": consts, "into": into, "last": last}
    numbers = {"count": count, "first": first, "order": order, "total": total, "sizes": sizes}
    kernel = function_of(program, "steps")[(triton.cdiv(total, BLOCK),)]
    given = {name: tuple(parts) for name, parts in tensors.items()}
    kernel(**given, **numbers, at_rows=at_rows, at_consts=at_consts, BLOCK=BLOCK)
    return last
