"""AOTAutograd, asked for its graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.fx as fx
from torch._functorch import config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition

__all__ = ["aot_module_simplified", "is_of_backward", "mark_boxed", "min_cut_rematerialization_partition", "patched"]

# aot_module_simplified(gm, inputs, fw_compiler, bw_compiler, partition_fn, decompositions=, inference_compiler=): hands
#     the forward and the backward graph to the compilers, or the one graph to the last where nothing has a gradient.
# min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how): the joint graph as a forward and a
#     backward, split where Inductor has it split; it heeds the tags of activation checkpointing.


def patched(**settings: Any) -> AbstractContextManager[Any]:
    """Other settings of torch._functorch.config within the context."""
    context: AbstractContextManager[Any] = config.patch(settings)
    return context


def mark_boxed(run: Any) -> Any:
    """Says of a compiled function that it takes one list, which it empties."""
    run._boxed_call = True
    return run


def is_of_backward(node: fx.Node) -> bool:
    """Of a node of a joint graph: whether autograd ran it for the gradients."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")
