"""Sums over tiles, in one launch each where Triton is at hand on an NVIDIA or AMD GPU (triton_merge.py).

They are operators of their own, so that they can be counted on tensors that have no numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ringopt.torch_compat.fake_tensors import FakeTensor

Tensors = Sequence[Tensor]

AT_ONCE = 4  # parts of one launch

LIBRARY = torch.library.Library("ringopt_kernels", "DEF")
LIBRARY.define(
    "merge_parts_(Tensor(a!) out, Tensor(b!) lse, Tensor[] sums, Tensor[] parts, Tensor[] lses, int[] firsts) -> ()"
)
LIBRARY.define("add_parts_(Tensor(a!)[] totals, Tensor[] parts) -> ()")


def merge_parts_(out: Tensor, lse: Tensor, sums: Tensors, parts: Tensors, lses: Tensors, firsts: Sequence[int]) -> None:
    """Makes of `out` [B, H, S, D] and `lse` [B, H, S] the softmax over all that `sums` (such a pair, or nothing; they
    may be `out` and `lse`) and up to AT_ONCE `parts` are softmaxes of. Part i is of the rows from firsts[i] on. A row
    that none of them sees anything of becomes 0 and -inf."""
    torch.ops.ringopt_kernels.merge_parts_(out, lse, sums, [dense(part) for part in parts], lses, firsts)


def add_parts_(totals: Tensors, parts: Tensors) -> None:
    """Adds to each total [B, H, S, D] its part, in float32."""
    if not (totals and usable(totals[0])):
        for total, part in zip(totals, parts, strict=True):
            total += part
        return
    for first in range(0, len(totals), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        torch.ops.ringopt_kernels.add_parts_(totals[some], [dense(part) for part in parts[some]])


def dense(x: Tensor) -> Tensor:
    """`x` with its last dim in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def usable(x: Tensor) -> bool:
    """Whether sums like `x` are made in one launch."""
    if x.device.type != "cuda" or x.dtype == torch.float64 or x.numel() == 0:
        return False
    return isinstance(x, FakeTensor) or has_triton(x.device)


@cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton runs here: tried once, for it takes a compiler and a driver beside itself. Where it is at hand and
    fails, a warning says why, and sums take several launches."""
    if find_spec("triton") is None:
        return False
    try:
        one, lse = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 1, 1, device=device)
        torch.ops.ringopt_kernels.merge_parts_(one, lse, [], [one + 1], [lse], [0])
        torch.ops.ringopt_kernels.add_parts_([one], [one.clone()])
        worked = bool((one == 2).all())
        why = "its sums are wrong"
    except Exception as error:
        worked, why = False, f"{type(error).__name__}: {error}"
    if not worked:
        warnings.warn(f"Triton does not work on {device}, so attention merges in more launches: {why}", stacklevel=2)
    return worked


def _merge(out: Tensor, lse: Tensor, sums: Tensors, parts: Tensors, lses: Tensors, firsts: Sequence[int]) -> None:
    from ringopt.kernels.triton_merge import merge

    with torch.cuda.device(out.device):
        merge(out, lse, sums, parts, lses, firsts)


def _add(totals: Tensors, parts: Tensors) -> None:
    from ringopt.kernels.triton_merge import add

    with torch.cuda.device(totals[0].device):
        add(totals, parts)


def _nothing(*args: object) -> None:
    """On tensors without numbers."""


LIBRARY.impl("merge_parts_", _merge, "CUDA")
LIBRARY.impl("add_parts_", _add, "CUDA")
LIBRARY.impl("merge_parts_", _nothing, "Meta")
LIBRARY.impl("add_parts_", _nothing, "Meta")
