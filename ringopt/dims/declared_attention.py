"""An operator that is declared to be attention (ringopt/rules/declare.py), spelled as scaled_dot_product_attention.

    out, lse = mylib::attend(q, k, v, True)      # B S H D
        ->
    out = permute(scaled_dot_product_attention(permute(q), permute(k), permute(v), is_causal=True), [0, 2, 1, 3])

Windows and packed sequences become a mask of arange and searchsorted, which classify_mask reads. Around the operator
may be an autograd.Function, whose backward calls the one that is declared for that: its node goes with the operator,
and the gradient is that of attention.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.op_families import COPIES, PADS
from ringopt.dims.view_rules import VIEWS
from ringopt.ir.autograd_function import CustomGradient, GradientArguments
from ringopt.ir.nodes import arguments_of, emit, is_aten, op_name, shape_of, value_of
from ringopt.ir.notes import SPELLED
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import same
from ringopt.rules.declare import AttentionRule, declaration_of, is_foreign, library_name
from ringopt.torch_compat.schema import OpOverload, schema_of

aten = torch.ops.aten

ORDER = {"BHSD": [0, 1, 2, 3], "BSHD": [0, 2, 1, 3]}


@dataclass(frozen=True)
class DeclaredSite:
    """A call of such an operator: what its rule says of this call, names replaced by what they stand for."""

    node: fx.Node
    says: AttentionRule
    given: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> DeclaredSite | None:
        says = declaration_of(node)
        return cls(node, says, arguments_of(node)) if isinstance(says, AttentionRule) else None

    def value(self, asked: Any) -> Any:
        return self.given[asked] if isinstance(asked, str) else asked

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        says = self.says
        return self.given[says.q], self.given[says.k], self.given[says.v]

    @property
    def packed(self) -> bool:
        return self.says.layout == "SHD"

    def sizes(self, x: fx.Node) -> tuple[Any, ...]:
        """B, H, S, D."""
        shape = shape_of(x)
        return (1, shape[1], shape[0], shape[2]) if self.packed else tuple(shape[d] for d in ORDER[self.says.layout])

    @property
    def causal(self) -> bool:
        return bool(self.value(self.says.causal))

    @property
    def window(self) -> tuple[int, int]:
        """Keys before and after; -1: all. Where it is causal, none after."""
        before, after = map(self.value, self.says.window or (-1, -1))
        return (-1 if before is None else before), (0 if self.causal else -1 if after is None else after)

    @property
    def plain(self) -> bool:
        """Whether scaled_dot_product_attention says it without a mask of its own."""
        (_, _, queries, _), (_, _, keys, _) = (self.sizes(x) for x in self.operands[:2])
        unbounded = self.window in ((-1, -1), (-1, 0))
        begins = not self.causal or same(queries, keys) or self.says.align == "first"
        return unbounded and begins and self.says.segments is None and (not self.causal or self.mask is None)

    @property
    def mask(self) -> fx.Node | None:
        return self.given[self.says.mask] if self.says.mask else None

    @property
    def result(self) -> list[fx.Node]:
        """The nodes that hold the attention: the operator itself, or elements of what it gives."""
        if isinstance(value_of(self.node), torch.Tensor):
            return [self.node]
        return [user for user in self.node.users if user.target is operator.getitem and user.args[1] == self.says.out]

    @property
    def other_results(self) -> list[fx.Node]:
        """Other results that are read."""
        result = self.result
        return [] if result == [self.node] else [user for user in self.node.users if user not in result and user.users]


def why_not(site: DeclaredSite) -> Refusal | None:
    """Why the operator stays as it is: shapes that the rule contradicts, a result that is read beside the attention."""
    why = contradiction(site) or unsaid(site)
    return Refusal(f"{schema_of(site.node.target).name}: {why}", site.node) if why else None


def contradiction(site: DeclaredSite) -> str:
    """Shapes and layout; "" where they fit."""
    says, layout = site.says, site.says.layout
    rank = 3 if site.packed else 4
    for name, x in zip((says.q, says.k, says.v), site.operands, strict=True):
        if not isinstance(value_of(x), torch.Tensor) or len(shape_of(x)) != rank:
            return f"its rule says {layout}, and {name} is {shape_text(x)}"
    (b, hq, queries, d), (bk, hk, keys, dk), (bv, hv, keys_v, dv) = map(site.sizes, site.operands)
    if not (same(b, bk) and same(b, bv) and same(keys, keys_v) and same(d, dk) and same(hk, hv)):
        return f"its rule says {layout}, which q, k, v {', '.join(map(shape_text, site.operands))} are not"
    if not (isinstance(hq, int) and isinstance(hk, int)) or hq % hk:
        return f"its rule says {layout}: {hq} query heads and {hk} KV heads"
    if not site.result:
        return "its attention is not read"
    for out in site.result:
        found = site.sizes(out) if len(shape_of(out)) == rank else ()
        if len(found) != 4 or not all(map(same, found, (b, hq, queries, dv))):
            return f"its rule says {layout}, and the result is {shape_text(out)}"
    if site.packed and says.segments is None:
        return "its rule says SHD and no segments"
    return ""


def unsaid(site: DeclaredSite) -> str:
    """What the rule leaves open, or nothing here can do; "" where it is all there."""
    says = site.says
    (_, _, queries, _), (_, _, keys, _) = (site.sizes(x) for x in site.operands[:2])
    if site.window != (-1, -1) and says.segments is None and says.align is None and not same(queries, keys):
        return f"{queries} queries, {keys} keys, causal or in a window: its rule does not say which match (align)"
    if site.mask is not None and site.packed:
        return "a mask beside packed sequences is nothing that a rule can say"
    if says.segments is not None and site.window != (-1, -1):
        first, second = (site.given[name] for name in says.segments)
        if first is not second:
            return "queries and keys are packed by different cumulative lengths, and it is causal or has a window"
    others = [node for node in site.other_results if not is_saved_only(node)]
    if others:
        return f"its result {others[0].args[1]} is read, which a sharded attention does not give"
    if saved_by(site) and gradient_of(site) is None:
        return "an autograd.Function keeps its results for a backward that the rule does not name"
    return ""


def shape_text(x: Any) -> str:
    """Of a tensor; what another argument is."""
    return str(list(shape_of(x))) if isinstance(value_of(x), torch.Tensor) else repr(x)


# ---- an autograd.Function around it ----------------------------------------------------------------------------------
def is_saved_only(node: fx.Node) -> bool:
    """Whether all that reads a value is the backward of an autograd.Function."""
    return all(
        isinstance(user.target, CustomGradient) and node in GradientArguments.of(user).saved
        and node not in GradientArguments.of(user).outputs
        for user in node.users
    )  # fmt: skip


def saved_by(site: DeclaredSite) -> list[fx.Node]:
    """The calls that keep results of the operator for their backward."""
    made = [*site.result, *site.other_results]
    return list(dict.fromkeys(user for x in made for user in x.users if isinstance(user.target, CustomGradient)))


def gradient_of(site: DeclaredSite) -> fx.Node | None:
    """The one autograd.Function that has the attention, or a view of it, for its only output and q, k, v, or what they
    are views of, for inputs; and whose backward is the declared operator among views, pads and new memory."""
    calls = saved_by(site)
    if len(calls) != 1 or site.says.backward is None:
        return None
    inside = [node for node in calls[0].target.backward.graph.nodes if node.op == "call_function"]
    foreign = [node for node in inside if isinstance(node.target, OpOverload) and not is_aten(node)]
    if [library_name(node.target) for node in foreign] != [site.says.backward]:
        return None
    harmless = all(node in foreign or node.target is operator.getitem or op_name(node) in HARMLESS for node in inside)
    arguments = GradientArguments.of(calls[0])
    outputs = [source(x) for x in arguments.outputs]
    if not harmless or len(outputs) != 1 or outputs[0] not in site.result:
        return None
    inputs = {source(x) for x in arguments.inputs}
    return calls[0] if {source(x) for x in site.operands} <= inputs else None


HARMLESS = frozenset(
    (*VIEWS, *COPIES, *PADS, "_set_grad_enabled", "empty_like", "empty", "new_empty", "zeros_like"),
)


def source(x: fx.Node) -> fx.Node:
    """Below views that keep all elements, and what only cuts them off from autograd."""
    while is_aten(x) and op_name(x) in ("detach", *COPIES):
        x = x.args[0]
    return x


# ---- the spelling ----------------------------------------------------------------------------------------------------
def spell_declared(graph: fx.Graph) -> None:
    """All that may be; the rest is refused where attention is looked for (passes/find_attention.py)."""
    for node in list(graph.nodes):
        site = DeclaredSite.of(node) if is_foreign(node) else None
        if site is not None and why_not(site) is None:
            spell(graph, site)


def spell(graph: fx.Graph, site: DeclaredSite) -> None:
    """Puts scaled_dot_product_attention in the place of the operator, and of an autograd.Function around it: behind
    that, for the operator itself stands where no gradient is taken."""
    node, gradient = site.node, gradient_of(site)
    with graph.inserting_before(gradient or node):
        q, k, v = (arranged(graph, site, x if gradient is None else source(x)) for x in site.operands)
        mask = site.mask if site.plain else visible(graph, site)
        grouped = not same(site.sizes(site.operands[0])[1], site.sizes(site.operands[1])[1])
        given = {"attn_mask": mask, "dropout_p": site.value(site.says.dropout), "is_causal": site.causal and site.plain}
        given |= {"scale": site.value(site.says.scale), "enable_gqa": grouped}
        made = emit(graph, aten.scaled_dot_product_attention.default, (q, k, v), node, given)
        made.meta[SPELLED] = op_name(node)
        result = back(graph, site, made)
    for read in list(gradient.users) if gradient is not None else site.result:
        read.replace_all_uses_with(result)
        if read is not node:
            graph.erase_node(read)
    if gradient is not None:
        graph.erase_node(gradient)
    for dead in reversed(below(node)):
        graph.erase_node(dead)


def below(node: fx.Node) -> list[fx.Node]:
    """A node that nobody reads any more, and what was made of it."""
    found = [node]
    for each in found:
        found += [user for user in each.users if user not in found]
    return sorted(found)


def arranged(graph: fx.Graph, site: DeclaredSite, x: fx.Node) -> fx.Node:
    """B H S D."""
    if site.packed:
        return emit(graph, aten.unsqueeze.default, (emit(graph, aten.permute.default, (x, [1, 0, 2]), x), 0), x)
    order = ORDER[site.says.layout]
    return x if order == sorted(order) else emit(graph, aten.permute.default, (x, order), x)


def back(graph: fx.Graph, site: DeclaredSite, made: fx.Node) -> fx.Node:
    """As the operator gives it."""
    if site.packed:
        return emit(graph, aten.permute.default, (emit(graph, aten.squeeze.dim, (made, 0), made), [1, 0, 2]), made)
    order = ORDER[site.says.layout]
    return made if order == sorted(order) else emit(graph, aten.permute.default, (made, order), made)


def visible(graph: fx.Graph, site: DeclaredSite) -> fx.Node:
    """[Sq, Sk] of bool, or the program's mask where that hides too: who sees whom."""
    like, says = site.node, site.says
    (_, _, queries, _), (_, _, keys, _) = (site.sizes(x) for x in site.operands[:2])
    device = value_of(site.operands[0]).device

    def numbers(size: Any) -> fx.Node:
        return emit(graph, aten.arange.default, (size,), like, {"device": device})

    def paired(op: Any, left: fx.Node, right: fx.Node) -> fx.Node:
        column = emit(graph, aten.unsqueeze.default, (left, 1), like)
        return emit(graph, op, (emit(graph, aten.unsqueeze.default, (right, 0), like), column), like)

    def shifted(x: fx.Node, by: Any) -> fx.Node:
        return x if isinstance(by, int) and by == 0 else emit(graph, aten.add.Scalar, (x, by), like)

    seen: list[fx.Node] = []
    if says.segments is not None:
        ends = [site.given[name] for name in says.segments]
        documents = [
            emit(graph, aten.searchsorted.Tensor, (end, numbers(size)), like, {"right": True})
            for end, size in zip(ends, (queries, keys), strict=True)
        ]
        seen.append(paired(aten.eq.Tensor, *documents))
    last = says.align == "last" and says.segments is None
    own = shifted(numbers(queries), keys - queries if last else 0)
    before, after = site.window
    if after >= 0:
        seen.append(paired(aten.le.Tensor, shifted(own, after), numbers(keys)))
    if before >= 0:
        seen.append(paired(aten.ge.Tensor, shifted(own, -before), numbers(keys)))
    mask = site.mask
    if mask is not None and value_of(mask).dtype == torch.bool:
        seen.append(mask)
    both = seen[0]
    for each in seen[1:]:
        both = emit(graph, aten.logical_and.default, (both, each), like)
    if mask is None or value_of(mask).dtype == torch.bool:
        return both
    hidden = emit(graph, aten.logical_not.default, (both,), like)
    return emit(graph, aten.masked_fill.Scalar, (mask, hidden, float("-inf")), like)
