"""What a node means beyond its operator: where its rows are, what this rank sends for it, its FLOPs, its attention.

Of a graph that the passes made, placements are in the nodes' meta; of a file that ringopt wrote, in meta["custom"], the
part that torch.export keeps. Else they are read off ringopt's own operators. Bytes follow distributed/mesh.py: what
this rank hands to the link in one forward, a collective counted as its ring algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ringopt.compare.graph_diff import SiteView
from ringopt.compare.program_files import TENSORS
from ringopt.context_parallel.geometry.dilation import dilation_of, is_dilated
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.mesh import registered
from ringopt.errors import OptionError, PlanError
from ringopt.expr.mask import Mask
from ringopt.ir.nodes import arguments_of, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.placement import Sharded
from ringopt.ops.local_length import check_enough
from ringopt.ops.sized_call import Open, SizedCall
from ringopt.ops.traffic import dilated_plan
from ringopt.ops.traits import attends, flops_of, sends, sent_bytes
from ringopt.torch_compat.schema import OpOverload, schema_of

# Local: each rank has its own, such as its part of a sum.
REPLICATED, LOCAL, UNKNOWN = "replicated", "local", "?"
SPREAD = ("ringopt::ring_attention", "ringopt::dilated_attention")
ATTENTION = ("aten::scaled_dot_product_attention", "ringopt::attention", *SPREAD)
PLANNED = 1 << 24  # a fetch of more rows times ranks is not unrolled to be counted
BLOCKS = 24  # a mask is drawn in as many blocks a side at most


@dataclass(frozen=True)
class Meaning:
    """See NodeView for the fields."""

    placement: str = REPLICATED
    bytes_sent: int | None = 0
    flops: int | None = 0
    site: SiteView | None = None


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
            self.site(node, arguments),
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
            return flops_of(node, self.call(node, self.ranks or 1))
        except (Open, PlanError, OptionError):
            return None

    # ---- attention -------------------------------------------------------------------------------------------------
    def site(self, node: fx.Node, arguments: Mapping[str, Any]) -> SiteView | None:
        name = qualified(node)
        if name not in ATTENTION:
            return None
        noted = (node.meta.get("custom") or {}).get("ringopt", {}).get("site", {})
        pattern = noted.get("pattern") or described_pattern(name, arguments)
        reason = noted.get("refusal") or ""
        drawn = draw(name, arguments)
        if name == "ringopt::dilated_attention":
            strategy = self.dilated_strategies(node) or arguments["strategy"]
            return SiteView(pattern, strategy, arguments["layout"], arguments["kernel"], reason, drawn)
        if name != "ringopt::ring_attention":
            return SiteView(pattern, "none", "none", "none", reason, drawn)
        kernel, layout = arguments["kernel"], arguments["q_layout"]
        return SiteView(pattern, arguments["strategy"], layout, kernel, reason, drawn)

    def dilated_strategies(self, node: fx.Node) -> str:
        """The strategy of each pattern, or "" where that is not known."""
        try:
            return dilated_plan(self.call(node, self.ranks)).strategies if self.ranks is not None else ""
        except (Open, PlanError, OptionError):
            return ""


def qualified(node: fx.Node) -> str:
    """`aten::linear`; "" for what is no operator."""
    return str(schema_of(node.target).name) if isinstance(node.target, OpOverload) else ""


def _operand_names(name: str) -> tuple[str, str, str]:
    return ("query", "key", "value") if name == ATTENTION[0] else ("q", "k", "v")


def pattern_text(name: str, arguments: Mapping[str, Any]) -> str:
    """The structure that an attention operator is called with: "causal", "window(64)", or "full" without one."""
    if name == ATTENTION[0]:
        return "causal" if arguments.get("is_causal") else "full"
    return str(arguments["pattern"])


def described_pattern(name: str, arguments: Mapping[str, Any]) -> str:
    """The structure, joined with "mask" where more than that hides keys or changes scores."""
    more = arguments.get("attn_mask") is not None or bool(arguments.get("mask"))
    structure = pattern_text(name, arguments)
    return (f"{structure} & mask" if structure != "full" else "mask") if more else structure


def draw(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The mask in at most BLOCKS x BLOCKS blocks, "?" where tensors decide; () where sizes are open."""
    query, key, _values = (value_of(arguments[of]) for of in _operand_names(name))
    mask = Mask.parse(arguments.get("mask") or "")
    rows = arguments.get("q_length", query.shape[-2] if isinstance(query, TENSORS) else None)
    keys = arguments.get("kv_length", key.shape[-2] if isinstance(key, TENSORS) else None)
    given = arguments.get("attn_mask") is not None
    if not isinstance(rows, int) or not isinstance(keys, int):
        return ()
    text = pattern_text(name, arguments)
    if is_dilated(text):
        return draw_dilated(text, arguments.get("length", rows), query.shape[1])
    pattern = pattern_of(text, rows, keys)
    lines = []
    for some in _drawn_blocks(rows):
        kinds = []
        for others in _drawn_blocks(keys):
            banded, seen = pattern.kind(some, others).value, mask.kind(_axis_ranges(some, others), {})
            if "empty" in (banded, seen):
                kinds.append(".")
            elif given or (seen == "partial" and mask.sources):
                kinds.append("?")
            else:
                kinds.append("#" if banded == seen == "full" else "/")
        lines.append("".join(kinds))
    return tuple(lines)


def draw_dilated(text: str, length: int, heads: int) -> tuple[str, ...]:
    """Of all heads together."""
    mark, sees = {Kind.EMPTY: ".", Kind.FULL: "#", Kind.PARTIAL: "/"}, dilation_of(text).kind
    blocks = _drawn_blocks(length) if isinstance(length, int) else []
    return tuple("".join(mark[sees(some, others, length, heads)] for others in blocks) for some in blocks)


def _axis_ranges(rows: range, keys: range) -> dict[str, range]:
    return {"b": range(1), "h": range(1), "q": rows, "k": keys}


def _drawn_blocks(length: int) -> list[range]:
    blocks = min(BLOCKS, length)
    return [range(length * i // blocks, length * (i + 1) // blocks) for i in range(blocks)]
