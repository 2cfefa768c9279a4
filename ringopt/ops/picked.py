"""`ringopt::picked`: a stretch of a program whose sizes inside are known only when it runs, as one operator.

    picked(operands, body, sizes, along, out, counts) -> Tensor

    rows = where(mask)[0];  y = y.index_add(0, rows, expert(x[rows]))   ->   y = picked([mask, x, y, *weights], ...)

`body` is the text of a graph (ringopt/scans/body.py), `sizes` tells the shape of the result by those of the operands.
Outside of it all sizes are plain. `along`, `out` and `counts` are what was proved of it (ringopt/dims/picks.py): on
some tokens it gives what it gives on all of them, at these tokens. `out` has each dim of the result that these may be
(-1: none), `along` for each of them that of every operand (-1: it has none). The backward runs the body again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringopt.ops.tags import ON_HOST
from ringopt.scans.body import from_text
from ringopt.torch_compat.autograd import never_compiled, no_autocast, recording

OPERANDS = "Tensor[] operands, str body, str sizes, int[] along, int[] out, int counts"


def sizes_text(dtype: torch.dtype, sizes: Sequence[int | tuple[int, int]]) -> str:
    """A size is a number, or (operand, its dim)."""
    return json.dumps({"dtype": str(dtype).removeprefix("torch."), "sizes": sizes}, separators=(",", ":"))


@lru_cache(maxsize=1024)
def held(text: str) -> dict[str, Any]:
    """The inverse of sizes_text."""
    found: dict[str, Any] = json.loads(text)
    return found


def like_result(operands: Sequence[Tensor], text: str) -> Tensor:
    """In new memory, without numbers."""
    sizes = [size if isinstance(size, int) else operands[size[0]].shape[size[1]] for size in held(text)["sizes"]]
    return operands[0].new_empty(sizes, dtype=getattr(torch, held(text)["dtype"]))


@torch.library.custom_op("ringopt::picked", mutates_args=(), tags=ON_HOST, schema=f"({OPERANDS}) -> Tensor")
def picked(operands: list[Tensor], body: str, sizes: str, along: list[int], out: list[int], counts: int) -> Tensor:
    """What `body` gives. Raises NoBody."""
    with no_autocast():
        (found,) = from_text(body).module(*operands)
    made = like_result(operands, sizes)
    if found.shape != made.shape:
        raise RuntimeError(f"ringopt::picked gives {list(found.shape)}, and {list(made.shape)} was expected")
    return made.copy_(found) if found.storage_offset() or not found.is_contiguous() else alone(found, operands)


def alone(found: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """In memory that no operand has."""
    shared = found.untyped_storage().data_ptr() in {x.untyped_storage().data_ptr() for x in operands}
    return found.clone() if shared else found


@picked.register_fake
def _(operands: list[Tensor], body: str, sizes: str, along: list[int], out: list[int], counts: int) -> Tensor:
    return like_result(operands, sizes)


@torch.library.custom_op(
    "ringopt::picked_backward",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"(Tensor grad, {OPERANDS}, int[] wanted) -> Tensor[]",
)
def picked_backward(
    grad: Tensor, operands: list[Tensor], body: str, sizes: str, along: list[int], out: list[int], counts: int,
    wanted: list[int],
) -> list[Tensor]:  # fmt: skip
    """Gradients of the operands `wanted`, by place."""
    with recording(), no_autocast():
        leaves = [x.detach().requires_grad_(place in wanted) for place, x in enumerate(operands)]
        (found,) = from_text(body).module(*leaves)
        asked = [leaves[place] for place in wanted]
        if not found.requires_grad:
            return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in asked]
        made = torch.autograd.grad(found, asked, grad, allow_unused=True, materialize_grads=True)
    return [x.clone(memory_format=torch.contiguous_format) for x in made]


@picked_backward.register_fake
def _(
    grad: Tensor, operands: list[Tensor], body: str, sizes: str, along: list[int], out: list[int], counts: int,
    wanted: list[int],
) -> list[Tensor]:  # fmt: skip
    return [operands[place].new_empty(operands[place].shape) for place in wanted]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    operands, *ctx.text = inputs
    ctx.save_for_backward(*operands)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    wanted = [place for place, x in enumerate(saved) if ctx.needs_input_grad[0][place]]
    found = dict(zip(wanted, picked_backward(grad, saved, *ctx.text, wanted), strict=True)) if wanted else {}
    return [found.get(place) for place in range(len(saved))], *[None] * len(ctx.text)


picked.register_autograd(never_compiled(_backward), setup_context=_setup)
