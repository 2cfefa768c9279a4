"""What a pass of ours over Inductor's graphs is made of."""

from __future__ import annotations

from typing import Any

from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

__all__ = ["FORCE_STRIDE_ORDER", "CustomGraphPass", "CustomPartitionerFn", "OrderedSet", "preserve_node_ordering"]

# CustomGraphPass: the base of a pass given to the setting post_grad_custom_post_pass: called with a graph, which it
#     changes in place; uuid() is part of the key by which compiled code is cached.
# CustomPartitionerFn: the same for the setting custom_partitioner_fn: called with a joint graph, its inputs and the
#     keywords of torch's partitioner, it returns a forward and a backward.
# preserve_node_ordering(graph, {node: OrderedSet of nodes}): ties a node to those that must have run before it, in code
#     that is generated too.
# OrderedSet: a set in the order in which its elements came.

# (x, order): x laid out so that its dim d is the order[d]-th fastest in memory.
FORCE_STRIDE_ORDER: Any = inductor_prims.force_stride_order
