"""Interpolation to the size that there is: torch's kernels for the CPU copy, whatever the scale factor.

    F.interpolate(x, scale_factor=1.01, mode="bilinear")   ->   clone(x)      # where that has the shape of x

What a compiler writes for it moves rows by the scale factor, as between other sizes.
"""

from __future__ import annotations

import torch
import torch.fx as fx
import torch.nn.functional as F

from ringopt.ir.nodes import bound
from ringopt.ir.symbolic_sizes import same

COPIED = (("linear", 3), ("bilinear", 4), ("trilinear", 5), ("nearest", 4))  # by mode and dims; not all that could be


def copy_where_sizes_stay(gm: fx.GraphModule) -> None:
    """Rewrites Dynamo's graph, and those in it."""
    for part in gm.modules():
        found = [node for node in part.graph.nodes if is_copy(node)] if isinstance(part, fx.GraphModule) else []
        for node in found:
            plain = node.meta["example_value"].is_contiguous()
            order = torch.contiguous_format if plain else torch.preserve_format
            node.target, node.args, node.kwargs = torch.clone, (bound(node)["input"],), {"memory_format": order}
        if found:
            part.recompile()


def is_copy(node: fx.Node) -> bool:
    """Whether a CPU gives what the node is given: not where it smooths what it makes smaller, for that moves rows."""
    after = node.meta.get("example_value")
    if node.target is not F.interpolate or not isinstance(after, torch.Tensor):
        return False
    how = bound(node)
    before = how["input"].meta["example_value"]
    stays = all(same(*sizes) for sizes in zip(before.shape, after.shape, strict=True))
    copied = (how["mode"], before.dim()) in COPIED and before.device.type == "cpu"
    return stays and copied and not how["antialias"]
