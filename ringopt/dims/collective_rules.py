"""Rules of torch's functional collectives, which a DTensor's operators call over the ranks of its own mesh.

    all_reduce              every dim: element by element
    all_gather_into_tensor  every dim but the first, along which the ranks' tensors are joined
    reduce_scatter_tensor   every dim but the first, of which each rank keeps a part

The ranks of that mesh hold the same tokens, so that all send rows of one length.
"""

from __future__ import annotations

import torch.fx as fx

from ringopt.dims.rule import Rule, RuleOf, pointwise, same_dims
from ringopt.ir.nodes import shape_of


def all_but_first(node: fx.Node) -> Rule:
    """Along the first dim the ranks have parts of their own."""
    return Rule((same_dims(len(shape_of(node)), but=(0,)),))


COLLECTIVES: dict[str, RuleOf] = {
    "_c10d_functional::all_reduce": pointwise,
    "_c10d_functional::wait_tensor": pointwise,
    "_c10d_functional::all_gather_into_tensor": all_but_first,
    "_c10d_functional::reduce_scatter_tensor": all_but_first,
}
