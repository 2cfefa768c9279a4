"""All steps of a recurrence in one launch, by the texts of by_element.py and by_matrix.py. Imported where Triton is at
hand only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from ringopt.hardware.precision import rounds_float32
from ringopt.kernels.score_program import function_of

Tensors = Sequence[Tensor]

BLOCK = 256
STAGES = (2, 1)  # how many steps' rows are in shared memory at once: as many as there is room for


def run_elements(
    program: str, carried: Tensors, rows: Tensors, consts: Tensors, into: Tensors, backwards: bool
) -> list[Tensor]:
    """The last carries; `into` is filled, for each output of the step. A carry that is not kept goes anywhere."""
    given, last = _given(carried, rows, consts, into, backwards)
    sizes, total = tuple(carried[0].shape), carried[0].numel()
    at_rows = tuple((x.stride(0), *x[0].expand(sizes).stride()) for x in rows)
    at_consts = tuple(x.expand(sizes).stride() for x in consts)
    kernel = function_of(program, "steps")[(triton.cdiv(total, BLOCK),)]
    kernel(**given, total=total, sizes=sizes, at_rows=at_rows, at_consts=at_consts, BLOCK=BLOCK)
    return last


def run_matrices(
    program: str,
    grid: tuple[int, int],
    carried: Tensors,
    rows: Tensors,
    consts: Tensors,
    into: Tensors,
    backwards: bool,
) -> list[Tensor] | None:
    """As above; None where a GPU has too little shared memory for the matrices of one step."""
    given, last = _given(carried, rows, consts, into, backwards)
    at_rows, at_consts = (tuple(x.stride() for x in some) for some in (rows, consts))
    precision = "tf32" if rounds_float32("cuda") else "ieee"
    kernel = function_of(program, "steps")[grid]
    for stages in STAGES:
        try:
            kernel(**given, at_rows=at_rows, at_consts=at_consts, PRECISION=precision, num_stages=stages)
        except OutOfResources:
            continue
        return last
    return None


def _given(
    carried: Tensors, rows: Tensors, consts: Tensors, into: Tensors, backwards: bool
) -> tuple[dict[str, Any], list[Tensor]]:
    """What both are given, and the last carries that they fill."""
    carried, count = [x.contiguous() for x in carried], rows[0].shape[0]
    last = [torch.empty_like(x) for x in carried]
    tensors = {"carries": carried, "rows": rows, "consts": consts, "into": into, "last": last}
    first, order = (count - 1, -1) if backwards else (0, 1)
    return {
        **{name: tuple(parts) for name, parts in tensors.items()},
        "count": count,
        "first": first,
        "order": order,
    }, last
