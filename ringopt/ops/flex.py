"""`ringopt::flex`: a call of flex_attention while it is being read.

    flex(q, k, v, product, scores)
    # q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], product and scores [B, Hq, Sq, Sk]

`product` is q @ k.mT, `scores` is what score_mod and mask_mod make of it, in plain ATen. capture writes it, find_flex
reads `scores` as a term and puts `ringopt::attention` in its place.
"""

from __future__ import annotations

from torch import Tensor

from ringopt.kernels.math import fold, unfold
from ringopt.ops.attention import LIBRARY
from ringopt.torch_compat.operators import SAFE_SOFTMAX

LIBRARY.define("flex(Tensor q, Tensor k, Tensor v, Tensor product, Tensor scores) -> Tensor")


def flex(q: Tensor, k: Tensor, v: Tensor, product: Tensor, scores: Tensor) -> Tensor:
    """[B, Hq, Sq, Dv], laid out in memory as q is; rows that see nothing are 0."""
    weights = SAFE_SOFTMAX(scores, -1).to(q.dtype)
    groups = q.shape[1] // k.shape[1]
    out: Tensor = unfold(fold(weights, groups) @ v, groups)
    order = sorted(range(3), key=q.stride().__getitem__, reverse=True)
    back = [order.index(dim) for dim in range(3)]
    return out.permute(*order, 3).contiguous().permute(*back, 3)


LIBRARY.impl("flex", flex, "CompositeImplicitAutograd")
