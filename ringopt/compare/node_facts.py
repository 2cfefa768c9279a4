"""What a node means beyond its operator: where its rows are, what this rank sends for it, its FLOPs, its attention.

Of a graph that the passes made, placements are in the nodes' meta; of a file that ringopt wrote, in meta["custom"], the
part that torch.export keeps. Else they are read off ringopt's own operators. Bytes follow distributed/mesh.py: what
this rank hands to the link in one forward, a collective counted as its ring algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ringopt.compare.graph_diff import SiteView
from ringopt.compare.program_files import TENSORS
from ringopt.context_parallel.geometry.dilation import dilation_of, is_dilated
from ringopt.context_parallel.geometry.layouts import layout_of, layouts_of
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.dilated import DilatedPlan, dilated_plan_of
from ringopt.context_parallel.plan.exchange import Cargo
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import Plan, plan_of
from ringopt.cost.message_bytes import Sizes, bytes_sent
from ringopt.cost.simulate import pairs_of
from ringopt.distributed.mesh import registered
from ringopt.errors import OptionError, PlanError
from ringopt.expr.mask import Mask
from ringopt.ir.nodes import value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.placement import Sharded
from ringopt.kernels.base import accumulator
from ringopt.ops.all_to_all import bytes_turned
from ringopt.ops.fetch_rows import Wanted, fetch_of
from ringopt.ops.local_length import check_enough
from ringopt.ops.reshard import plan_respread
from ringopt.overlap.collective_order import SILENT

# Local: each rank has its own, such as its part of a sum.
REPLICATED, LOCAL, UNKNOWN = "replicated", "local", "?"
SPREAD = ("ringopt::ring_attention", "ringopt::dilated_attention")
ATTENTION = ("aten::scaled_dot_product_attention", "ringopt::attention", *SPREAD)
# Operators of products, and the argument whose last size (of a convolution: all but the first) is summed over.
PRODUCTS = {
    "aten::linear": 0, "aten::matmul": 0, "aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::addmm": 1,
    "aten::baddbmm": 1, "aten::conv1d": 1, "aten::conv2d": 1, "aten::conv3d": 1,
    "ringopt::convolve_rows": 1,
}  # fmt: skip
PLANNED = 1 << 24  # a fetch of more rows times ranks is not unrolled to be counted
# Of an exchange, apart from the operator with which its bytes are counted.
ENDS = (
    "ringopt::ring_start", "ringopt::dilated_start", "ringopt::ring_backward_finish", "ringopt::gather_finish",
    "ringopt::reduce_finish",
)  # fmt: skip
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

    def sizes(self, value: Any) -> list[int] | None:
        """Of a tensor; None where one is open."""
        if not isinstance(value, TENSORS):
            return None
        known = [size if isinstance(size, int) else size.node.expr.xreplace(self.rows) for size in value.shape]
        return list(map(int, known)) if all(isinstance(size, int) or size.is_Integer for size in known) else None

    def of(self, node: fx.Node) -> Meaning:
        arguments = arguments_of(node)
        return Meaning(
            self.placement(node, arguments), self.bytes_sent(node, arguments), self.flops(node, arguments),
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

    # ---- what is sent ----------------------------------------------------------------------------------------------
    def bytes_sent(self, node: fx.Node, arguments: Mapping[str, Any]) -> int | None:
        name = qualified(node)
        if name in SILENT or name in ENDS or "group" not in arguments:
            return 0
        if name == "ringopt::ring_attention":
            return self.attention_bytes(arguments)
        if name == "ringopt::dilated_attention":
            return self.dilated_bytes(arguments)
        if name in ("ringopt::fetch_rows", "ringopt::convolve_rows"):
            return self.fetch_bytes(arguments)
        if name == "ringopt::respread":
            return self.respread_bytes(arguments)
        if name == "ringopt::turn":
            return self.turned_bytes(arguments)
        ranks, sizes = self.ranks, self.sizes(value_of(node))
        if ranks is None or sizes is None or name not in ("ringopt::gather", "ringopt::reduce_from_group"):
            return None
        whole = math.prod(sizes) * value_of(node).dtype.itemsize
        if name == "ringopt::reduce_from_group":
            return int(2 * whole * (ranks - 1) // ranks)
        layout = layout_of(arguments["layout"], arguments["length"], ranks)
        return int(whole // layout.length * layout.most * (ranks - 1))

    def fetch_bytes(self, arguments: Mapping[str, Any]) -> int | None:
        """Rows for other ranks, by the plan that the operator follows."""
        x, length, ranks = arguments["x"], arguments["length"], self.ranks
        sizes = self.sizes(value_of(x))
        if ranks is None or sizes is None or ranks * length > PLANNED:
            return None
        here = count(layout_of(layouts_of(arguments["layout"])[0], length, ranks).ranges(self.rank))
        wanted = Wanted.of(arguments.get("form", "halo"), arguments["numbers"])
        plan = fetch_of(wanted, arguments["layout"], length, ranks, self.rank, torch.device("cpu"))
        row = math.prod(sizes) * value_of(x).dtype.itemsize // max(here, 1)
        return sum(len(rows) for _peer, rows in plan.sends) * int(row)

    def respread_bytes(self, arguments: Mapping[str, Any]) -> int | None:
        sizes, old, new = self.sizes(value_of(arguments["x"])), tuple(arguments["old"]), tuple(arguments["new"])
        if self.ranks is None or sizes is None or self.ranks * math.prod(old) > PLANNED:
            return None
        layouts = arguments["old_layout"], arguments["new_layout"]
        plan = plan_respread(old, new, *layouts, self.ranks, self.rank, torch.device("cpu"))
        place = math.prod(sizes) * value_of(arguments["x"]).dtype.itemsize // max(sizes[arguments["dim"]], 1)
        return sum(len(rows) for _peer, rows in plan.sends) * int(place)

    def turned_bytes(self, arguments: Mapping[str, Any]) -> int | None:
        x, new = arguments["x"], arguments["new"]
        sizes = self.sizes(value_of(x))
        if self.ranks is None or sizes is None or not all(isinstance(size, int) for size in new):
            return None
        size = math.prod(sizes) * value_of(x).dtype.itemsize
        return bytes_turned(size, new, arguments["new_layout"], self.ranks, self.rank)

    def attention_bytes(self, arguments: Mapping[str, Any]) -> int | None:
        query, key, value = (self.sizes(value_of(arguments[name])) for name in "qkv")
        plan = self.plan(arguments)
        if query is None or key is None or value is None or plan is None:
            return None
        dtype = value_of(arguments["k"]).dtype
        numbers = (dtype.itemsize, accumulator(dtype).itemsize)
        return bytes_sent(plan, Sizes(key[0], query[1], key[1], key[3], value[3], *numbers), self.rank)

    def plan(self, arguments: Mapping[str, Any]) -> Plan | None:
        """The plan of a ring_attention; None where these ranks cannot run it."""
        lengths = arguments["q_length"], arguments["kv_length"]
        if self.ranks is None or not all(isinstance(length, int) for length in lengths):
            return None
        layouts = arguments["q_layout"], arguments["kv_layout"]
        heads = (value_of(arguments["q"]).shape[1], value_of(arguments["k"]).shape[1])
        try:
            return plan_of(arguments["pattern"], *lengths, self.ranks, *layouts, arguments["strategy"], heads)
        except (PlanError, OptionError):
            return None

    def dilated_plan(self, arguments: Mapping[str, Any]) -> DilatedPlan | None:
        """The plan of dilated attention, spread or not; None where these ranks cannot run it, or sizes are open."""
        query, key = (value_of(arguments[name]).shape for name in "qk")
        length = arguments.get("length", query[2])
        ranks = self.ranks if "length" in arguments else 1
        if ranks is None or not isinstance(length, int):
            return None
        how = (arguments.get("layout", "contiguous"), arguments.get("strategy", "auto"))
        try:
            return dilated_plan_of(arguments["pattern"], length, query[1], key[1], ranks, *how)
        except (PlanError, OptionError):
            return None

    def dilated_bytes(self, arguments: Mapping[str, Any]) -> int | None:
        key, value = (value_of(arguments[name]) for name in "kv")
        plan = self.dilated_plan(arguments)
        row = key.shape[0] * (key.shape[3] + value.shape[3]) * key.dtype.itemsize
        return int(plan.sent_rows(self.rank, Cargo.OUT) * row) if plan is not None else None

    # ---- what is computed ------------------------------------------------------------------------------------------
    def flops(self, node: fx.Node, arguments: Mapping[str, Any]) -> int | None:
        """2 a multiplication; of attention only the pairs that the pattern's structure lets see each other."""
        name = qualified(node)
        if name in ATTENTION:
            return self.attention_flops(name, arguments)
        if name not in PRODUCTS:
            return 0
        out, operand = self.sizes(value_of(node)), self.sizes(value_of(node.args[PRODUCTS[name]]))
        if out is None or operand is None:
            return None
        return 2 * math.prod(out) * (math.prod(operand[1:]) if "conv" in name else operand[-1])

    def attention_flops(self, name: str, arguments: Mapping[str, Any]) -> int | None:
        query, key, value = (self.sizes(value_of(arguments[of])) for of in operands_of(name))
        if query is None or key is None or value is None or len(query) < 2:
            return None
        if is_dilated(pattern_text(name, arguments)):
            dilated = self.dilated_plan(arguments)
            rank = self.rank if name in SPREAD else 0
            return 2 * query[0] * dilated.pairs(rank) * (query[-1] + value[-1]) if dilated is not None else None
        each = 2 * math.prod(query[:-2]) * (query[-1] + value[-1])
        if name != "ringopt::ring_attention":
            rows, keys = range(query[-2]), range(key[-2])
            return each * pattern_of(pattern_text(name, arguments), len(rows), len(keys)).pairs(rows, keys)
        plan = self.plan(arguments)
        if plan is None:
            return None
        if isinstance(plan, HeadExchange):
            return each // plan.q_heads * len(plan.share(self.rank)) * pairs_of(plan.whole, self.rank // plan.node)
        return each * pairs_of(plan, self.rank)

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
            plan = self.dilated_plan(arguments)
            strategy = plan.strategies if plan is not None else arguments["strategy"]
            return SiteView(pattern, strategy, arguments["layout"], arguments["kernel"], reason, drawn)
        if name != "ringopt::ring_attention":
            return SiteView(pattern, "none", "none", "none", reason, drawn)
        kernel, layout = arguments["kernel"], arguments["q_layout"]
        return SiteView(pattern, arguments["strategy"], layout, kernel, reason, drawn)


def qualified(node: fx.Node) -> str:
    """`aten::linear`; "" for what is no operator."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the schema, defaults included; {} for what is no operator."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    schema = node.target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given = dict(zip([argument.name for argument in schema], node.args, strict=False))
    return {**defaults, **given, **node.kwargs}


def operands_of(name: str) -> tuple[str, str, str]:
    return ("query", "key", "value") if name == ATTENTION[0] else ("q", "k", "v")


def pattern_text(name: str, arguments: Mapping[str, Any]) -> str:
    if name == ATTENTION[0]:
        return "causal" if arguments.get("is_causal") else "full"
    return str(arguments["pattern"])


def described_pattern(name: str, arguments: Mapping[str, Any]) -> str:
    """The structure, and "mask" beside it where more than that hides keys or changes scores."""
    more = arguments.get("attn_mask") is not None or bool(arguments.get("mask"))
    structure = pattern_text(name, arguments)
    return (f"{structure} & mask" if structure != "full" else "mask") if more else structure


def draw(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The mask in at most BLOCKS x BLOCKS blocks, "?" where tensors decide; () where sizes are open."""
    query, key, _values = (value_of(arguments[of]) for of in operands_of(name))
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
    for some in cut(rows):
        kinds = []
        for others in cut(keys):
            banded, seen = pattern.kind(some, others).value, mask.kind(square(some, others), {})
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
    blocks = cut(length) if isinstance(length, int) else []
    return tuple("".join(mark[sees(some, others, length, heads)] for others in blocks) for some in blocks)


def square(rows: range, keys: range) -> dict[str, range]:
    return {"b": range(1), "h": range(1), "q": rows, "k": keys}


def cut(length: int) -> list[range]:
    blocks = min(BLOCKS, length)
    return [range(length * i // blocks, length * (i + 1) // blocks) for i in range(blocks)]
