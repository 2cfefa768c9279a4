"""What a pass of ours over Inductor's graphs is made of."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor import custom_graph_pass, inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

__all__ = [
    "FORCE_STRIDE_ORDER", "CustomGraphPass", "CustomPartitionerFn", "OrderedSet", "preserve_node_ordering", "with_last",
]  # fmt: skip

# CustomGraphPass: the base of a pass given to the setting post_grad_custom_post_pass: called with a graph, which it
#     changes in place; uuid() is part of the key by which compiled code is cached.
# CustomPartitionerFn: the same for the setting custom_partitioner_fn: called with a joint graph, its inputs and the
#     keywords of torch's partitioner, it returns a forward and a backward.
# preserve_node_ordering(graph, {node: OrderedSet of nodes}): ties a node to those that must have run before it, in code
#     that is generated too.
# OrderedSet: a set in the order in which its elements came.

# (x, order): x laid out so that its dim d is the order[d]-th fastest in memory.
FORCE_STRIDE_ORDER: Any = inductor_prims.force_stride_order


def with_last(theirs: Any, ours: CustomGraphPass) -> Any:
    """The setting post_grad_custom_post_pass, of which a user has made `theirs`, with one more pass behind it."""
    if theirs is None:
        return ours
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):  # since torch 2.13 it may be several
        return [*custom_graph_pass.get_custom_graph_passes(theirs), ours]
    asks: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)  # whoever calls it looks at its class
    aware = asks is not None and isinstance(theirs, asks)
    return (type("BothInferenceAware", (Both, asks), {}) if aware else Both)(theirs, ours)


class Both(CustomGraphPass):
    """Two passes, one after the other. `first` may be any function of a graph; what else it is called with, `how`, is
    for it alone."""

    def __init__(self, first: Any, second: CustomGraphPass):
        self.first, self.second = first, second

    def __call__(self, graph: fx.Graph, **how: Any) -> None:
        self.first(graph, **how)
        self.second(graph)

    def uuid(self) -> Any:
        """None, with which nothing is cached, where one of them has none."""
        both = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in (self.first, self.second)]
        return None if None in both else tuple(both)
