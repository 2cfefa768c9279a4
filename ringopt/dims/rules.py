"""How the dims of an op's output come from the dims of its operands: one table for all directions.

An op is *token-wise* along a dim when element i of the output along it needs element i of an operand and no other.
`rule_of(node)` says along which dims. From that one fact follow where a sharded operand takes the output (`push`),
which operands must be sharded for a sharded output (`pull`), and which dims are summed away (`summed`), so that
partial sums over the ranks add up to the result. Ops without a rule mix tokens in a way this table does not know.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.dims.collective_rules import COLLECTIVES
from ringopt.dims.contraction_rules import LOOK_UPS, PRODUCTS
from ringopt.dims.declared import declared_rule, element_rule
from ringopt.dims.op_families import CASTS, COPIES, ELEMENTWISE
from ringopt.dims.reduction_rules import LAYERS, MIXING, REDUCTIONS
from ringopt.dims.rule import Rule, RuleOf, aligned, pointwise, same_dims
from ringopt.dims.view_rules import VIEWS
from ringopt.ir.nodes import is_tensor, named, op_name, shape_of
from ringopt.rules.declare import declared_for, is_foreign
from ringopt.torch_compat.schema import OpOverload, schema_of


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call_function node, or None."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        of_element = element_rule(node) if is_foreign(node.args[0]) else None
        return of_element or (Rule((same_dims(len(shape_of(node))),)) if is_tensor(node) else None)
    target, name = node.target, op_name(node)
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None  # the random numbers of a shard are not a shard of the random numbers
    if name in RULES:
        return RULES[name](node)
    if is_foreign(node) and declared_for(target) is not None:
        return declared_rule(node)
    if torch.Tag.pointwise in target.tags or name in POINTWISE or name.startswith("special_"):
        return pointwise(node)
    return None


def is_known(node: fx.Node) -> bool:
    """Whether there are rules for the op, even if they give none for this call of it."""
    target, name = node.target, op_name(node)
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    return name in RULES or torch.Tag.pointwise in target.tags or name in POINTWISE


# Token-wise ops that carry no pointwise tag; so do those of torch.special but its softmax and its sums.
POINTWISE = frozenset(
    {*ELEMENTWISE, *COPIES, *CASTS, "detach", "expand_as", "float", "double", "half", "bfloat16"}
    | {"full_like", "zeros_like", "ones_like", "empty_like", "polar", "complex", "real", "imag", "conj", "_conj"}
    | {"resolve_conj", "_neg_view", "resolve_neg", "isreal"}
)


def attention(node: fx.Node) -> Rule | None:
    """Batch and heads are independent, but for random numbers and for a mask that depends on the batch or the head; how
    the sequence is sharded is the plan's concern (ringopt/context_parallel), not this table's."""
    call = AttentionCall.of(node)
    asked = call.mask_term.asks
    if call.attn_mask is not None or call.seed is not None or "b" in asked:
        return None
    heads, kv_heads = call.heads
    dims = {0: 0, 1: 1} if heads == kv_heads and "h" not in asked else {0: 0}
    rules = (dims, dims, dims, *({} for _ in call.sources))
    if call.sinks is None:
        return Rule(rules)
    of_sinks = {out: dim for out, dim in aligned(shape_of(call.q)[:2], shape_of(call.sinks)).items() if out in dims}
    return Rule((*rules, of_sinks))


def picked(node: fx.Node) -> Rule | None:
    """As was proved of its body (ringopt/dims/picks.py); of pieces by their counts nothing holds by itself."""
    along, outs, counts = (named(node, name) for name in ("along", "out", "counts"))
    if min(outs) < 0 or counts >= 0:
        return None
    operands = len(node.args[0])
    dims = [dict(zip(outs, along[i::operands], strict=True)) for i in range(operands)]
    return Rule(tuple({out: dim for out, dim in own.items() if dim >= 0} for own in dims))


RULES: dict[str, RuleOf] = {
    **VIEWS, **MIXING, **REDUCTIONS, **LAYERS, **PRODUCTS, **LOOK_UPS, **COLLECTIVES,
    "attention": attention, "picked": picked,
}  # fmt: skip
