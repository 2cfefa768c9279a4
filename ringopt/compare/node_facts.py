"""What a node means beyond its operator: where its rows are, what this rank sends for it, its FLOPs, its attention.

Of a graph that the passes made, placements are in the nodes' meta; of a file that ringopt wrote, in meta["custom"], the
part that torch.export keeps. Else they are read off ringopt's own operators. Bytes follow distributed/mesh.py: what
this rank hands to the link in one forward, a collective counted as its ring algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from ringopt.compare.graph_diff import SiteView
from ringopt.compare.mask_picture import TORCH, mask_picture, pattern_text
from ringopt.compare.program_files import TENSORS
from ringopt.compare.torch_counters import counted_flops, is_product_name, named_flops
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.distributed.mesh import registered
from ringopt.errors import OptionError, PlanError
from ringopt.ir.nodes import arguments_of, op_name, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.placement import Sharded
from ringopt.ops.local_length import check_enough
from ringopt.ops.sized_call import Open, SizedCall
from ringopt.ops.traffic import dilated_plan, ring_plan
from ringopt.ops.traits import attends, flops_of, sends, sent_bytes
from ringopt.torch_compat.pytree import tree_map
from ringopt.torch_compat.schema import OpOverload, schema_of

# Local: each rank has its own, such as its part of a sum.
REPLICATED, LOCAL, UNKNOWN = "replicated", "local", "?"
SPREAD = ("ringopt::ring_attention", "ringopt::dilated_attention")
ATTENTION = (TORCH, "ringopt::attention", *SPREAD)
PLANNED = 1 << 24  # a fetch of more rows times ranks is not unrolled to be counted


@dataclass(frozen=True)
class Meaning:
    """See NodeView for the fields."""

    placement: str = REPLICATED
    bytes_sent: int | None = 0
    flops: int | None = 0
    site: SiteView | None = None
    result_bytes: int | None = 0


class Reader:
    """Reads one graph. `ranks` holds where the graph does not tell how many there are. Raises PlanError where they are
    too many for it."""

    def __init__(self, graph: fx.Graph, ranks: int | None = None):
        self.ranks, self.rank = ranks, 0
        ours = [arguments_of(node) for node in graph.nodes if qualified(node).startswith("ringopt::")]
        names = {str(arguments["group"]) for arguments in ours if "group" in arguments}
        self.sharded = bool(names)
        for name in sorted(names):
            if name.startswith("pretend:"):
                self.rank, self.ranks = map(int, name.removeprefix("pretend:").split("/"))
            elif (mesh := registered(name)) is not None:
                self.rank, self.ranks = mesh.rank, mesh.size
        self.rows = dict(self.open_rows(graph))

    def open_rows(self, graph: fx.Graph) -> Iterator[tuple[Any, int]]:
        """The open sizes of a program for any number of ranks, where there are `ranks` of them."""
        for node in graph.nodes:
            arguments = arguments_of(node) if qualified(node) == "ringopt::rows_here" else {}
            if self.ranks is not None and isinstance(arguments.get("length"), int):
                if self.ranks > 1:
                    check_enough(arguments["length"], arguments["layout"], self.ranks)
                held = layout_of(arguments["layout"], arguments["length"], self.ranks).ranges(self.rank)
                yield value_of(node).node.expr, count(held)

    def of(self, node: fx.Node) -> Meaning:
        arguments = arguments_of(node)
        return Meaning(
            self.placement(node, arguments), self.bytes_sent(node), self.flops(node),
            self.site(node, arguments), self.result_bytes(node),
        )  # fmt: skip

    # ---- where the rows are ----------------------------------------------------------------------------------------
    def placement(self, node: fx.Node, arguments: Mapping[str, Any]) -> str:
        noted = (node.meta.get("custom") or {}).get("ringopt", {}).get("placement")
        name = qualified(node)
        if not self.sharded or node.op in ("placeholder", "get_attr", "output"):
            return REPLICATED
        if name in SPREAD:
            return REPLICATED if arguments.get("q_layout") == "replicated" else str(Sharded(2, 1, 1, 1))
        if name in ("ringopt::reduce_from_group", "ringopt::copy_all_to_group"):
            return REPLICATED
        if noted:
            return str(noted)
        if PLACEMENT in node.meta:
            return str(node.meta[PLACEMENT] or (REPLICATED if node.meta.get(WHOLE) is not None else LOCAL))
        if name == "ringopt::scatter":
            return str(Sharded(*(arguments[key] for key in ("dim", "outer", "length", "inner"))))
        return REPLICATED if name == "ringopt::gather" else UNKNOWN

    # ---- what is sent and computed ----------------------------------------------------------------------------------
    def number(self, size: Any) -> int:
        """Raises Open where it is not known."""
        known = size if isinstance(size, int) else size.node.expr.xreplace(self.rows)
        if not isinstance(known, int) and not known.is_Integer:
            raise Open(f"size {known}")
        return int(known)

    def call(self, node: fx.Node, ranks: int) -> SizedCall:
        return SizedCall.of(node, ranks, self.rank, number=self.number, most=PLANNED)

    def bytes_sent(self, node: fx.Node) -> int | None:
        """None where it is not known: ranks or sizes are symbolic, or these ranks cannot run it."""
        if not sends(node):
            return 0
        try:
            return sent_bytes(self.call(node, self.ranks)) if self.ranks is not None else None
        except (Open, PlanError, OptionError):
            return None

    def flops(self, node: fx.Node) -> int | None:
        """2 a multiplication; of attention only the pairs that the pattern's structure lets see each other."""
        if self.ranks is None and attends(node):
            return None
        try:
            if not isinstance(node.target, OpOverload):
                return self.called(node)
            return flops_of(node, self.call(node, self.ranks or 1)) or self.counted(node)
        except (Open, PlanError, OptionError):
            return None

    def called(self, node: fx.Node) -> int | None:
        """Of a function, a method or a module of Python, as graphs of others have them. Raises Open."""
        if node.op == "call_module":
            module = node.graph.owning_module and node.graph.owning_module.get_submodule(str(node.target))
            return 0 if module is not None and next(module.parameters(), None) is None else None
        name = op_name(node) if node.op == "call_function" else str(node.target)
        if not node.op.startswith("call") or not is_product_name(name):
            return 0
        values = fx.map_arg(([*node.args, *node.kwargs.values()], node), value_of)
        given, result = tree_map(self.meta, values)
        return named_flops(name, given, result)

    def counted(self, node: fx.Node) -> int | None:
        """By torch's own counter, of operators that are no products to ringopt. Raises Open."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in flop_registry:
            return 0
        given, named, result = tree_map(self.meta, fx.map_arg((node.args, node.kwargs, node), value_of))
        return counted_flops(packet, given, named, result)

    def meta(self, value: Any) -> Any:
        """A tensor without memory in the place of one. Raises Open."""
        if not isinstance(value, TENSORS):
            return value
        return torch.empty([self.number(size) for size in value.shape], dtype=value.dtype, device="meta")

    def result_bytes(self, node: fx.Node) -> int | None:
        """Of what it gives; None where sizes are open."""
        if node.op == "output":
            return 0
        found = value_of(node) if isinstance(value_of(node), (list, tuple)) else [value_of(node)]
        tensors = [value for value in found if isinstance(value, TENSORS)]
        try:
            return sum(prod(map(self.number, value.shape)) * value.dtype.itemsize for value in tensors)
        except Open:
            return None

    # ---- attention -------------------------------------------------------------------------------------------------
    def site(self, node: fx.Node, arguments: Mapping[str, Any]) -> SiteView | None:
        name = qualified(node)
        if name not in ATTENTION:
            return None
        noted = (node.meta.get("custom") or {}).get("ringopt", {}).get("site", {})
        pattern = noted.get("pattern") or described_pattern(name, arguments)
        reason = noted.get("refusal") or ""
        drawn = mask_picture(name, arguments, self.plan(node) if name == SPREAD[0] else None)
        picture = vars(drawn) if drawn is not None else {}
        seen = {"mask": picture.get("seen", ()), "ranks": picture.get("ranks", ()), "steps": picture.get("steps", ())}
        if name == "ringopt::dilated_attention":
            strategy = self.dilated_strategies(node) or arguments["strategy"]
            return SiteView(pattern, strategy, arguments["layout"], arguments["kernel"], reason, **seen)
        if name != "ringopt::ring_attention":
            return SiteView(pattern, "none", "none", "none", reason, **seen)
        kernel, layout = arguments["kernel"], arguments["q_layout"]
        return SiteView(pattern, arguments["strategy"], layout, kernel, reason, **seen)

    def plan(self, node: fx.Node) -> Plan | None:
        """Of a ring_attention; None where it is not known."""
        try:
            return ring_plan(self.call(node, self.ranks)) if self.ranks is not None else None
        except (Open, PlanError, OptionError):
            return None

    def dilated_strategies(self, node: fx.Node) -> str:
        """The strategy of each pattern, or "" where that is not known."""
        try:
            return dilated_plan(self.call(node, self.ranks)).strategies if self.ranks is not None else ""
        except (Open, PlanError, OptionError):
            return ""


def qualified(node: fx.Node) -> str:
    """`aten::linear`; "" for what is no operator."""
    return str(schema_of(node.target).name) if isinstance(node.target, OpOverload) else ""


def described_pattern(name: str, arguments: Mapping[str, Any]) -> str:
    """The structure, joined with "mask" where more than that hides keys or changes scores."""
    more = arguments.get("attn_mask") is not None or bool(arguments.get("mask"))
    structure = pattern_text(name, arguments)
    return (f"{structure} & mask" if structure != "full" else "mask") if more else structure
