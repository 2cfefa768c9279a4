"""Where a dim comes from: the features of a layer, parameters, or an input of the program.

What a linear layer, a convolution or a norm gives along its feature dim is not a sequence. Dims are followed upwards
through ops that keep them (ringopt/dims/rules.py), through views by factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ringopt.dims.op_families import (
    CONVOLUTIONS,
    PADS,
    RUNNING,
    SLICES,
    SOFTMAXES,
    SPLITS,
    TRANSFORMS,
    TRANSPOSED_CONVOLUTIONS,
)
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import is_tensor, op_name, shape_of, tensor_args, value_of
from ringopt.ir.notes import OF_PROGRAM, PARAMETER
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import at_hand

# Dim 1 has the features they make.
FEATURES_SECOND = frozenset((*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, "convolution", "_convolution"))
NORMS = frozenset(("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"))
# Entries are left out, added or moved; the dim stays a sequence, or features, as it was.
KEEPING = frozenset(
    {*SLICES, *SPLITS, *PADS, *SOFTMAXES, *FEATURES_SECOND, *RUNNING, *TRANSFORMS, "cumsum"}
    | {"cat", "roll", "flip", "dropout", "getitem", "index_select"}
)


@dataclass(frozen=True)
class Origin:
    """The end of the way up: `kind` is "features", "parameter", "input" or "unknown"; `last`: the last dim of it, which
    in floating tensors holds features as a rule; `place`: the dim, of parameters and inputs."""

    kind: str
    node: fx.Node
    last: bool = False
    place: Sharded | None = None


def origins(node: fx.Node, dim: int) -> set[Origin]:
    """Where dim `dim` of `node` comes from, over all operands that it runs along with."""
    found: set[Origin] = set()
    seen: set[tuple[fx.Node, Sharded]] = set()
    stack = [(node, Sharded(dim % len(shape_of(node)), 1, shape_of(node)[dim], 1))]
    while stack:
        here = stack.pop()
        if here in seen:
            continue
        seen.add(here)
        end, above = step(*here)
        if end is not None:
            found.add(end)
        stack.extend(above)
    return found


def step(node: fx.Node, place: Sharded) -> tuple[Origin | None, list[tuple[fx.Node, Sharded]]]:
    """Either the end, or the operands to follow."""
    rank, name = len(shape_of(node)), op_name(node)
    last = place.dim == rank - 1
    if node.op in ("placeholder", "get_attr"):
        kind = "parameter" if node.meta.get(PARAMETER) else "input"
        return Origin(kind, node, last, place), []
    made = (
        (name in ("linear", "embedding") and last)
        or (name in FEATURES_SECOND and place.dim == 1)
        or (name in NORMS and place.dim >= rank - len(node.args[1]))
    )
    if made:
        return Origin("features", node, last), []
    rule, operands = rule_of(node), list(tensor_args(node))
    wanted = rule.pull(place) if rule is not None and len(rule.operands) == len(operands) else None
    if wanted is not None and rule is not None and rule.summed and weighed(operands, wanted):
        return Origin("features", node, last), []
    if wanted is not None:
        return None, [(arg, at) for arg, at in zip(operands, wanted, strict=True) if at is not None]
    if name in KEEPING and (main := kept_of(name, operands, rank, place.dim)) is not None:
        return None, [(main, Sharded(place.dim, 1, shape_of(main)[place.dim], 1))]
    return Origin("unknown", node, last), []


def kept_of(name: str, operands: list[fx.Node], rank: int, dim: int) -> fx.Node | None:
    """The operand that says what the dim is: the first; of `cat`, which puts a few learned tokens before a sequence and
    skips what has no entries, the longest. None where it has a single entry."""
    alike = [x for x in operands if len(shape_of(x)) == rank]
    if name == "cat":
        alike.sort(key=lambda x: at_hand(shape_of(x)[dim]), reverse=True)
    return alike[0] if alike and shape_of(alike[0])[dim] > 1 else None


def is_row(origin: Origin) -> bool:
    """Whether the dim counts tokens: any dim of integer inputs, and all but the last, the features, of floating
    ones."""
    return origin.kind == "input" and not (origin.last and value_of(origin.node).is_floating_point())


def weighed(operands: list[fx.Node], wanted: list[Sharded | None]) -> bool:
    """Whether the dim is the columns of a weight: a product's operand that is a parameter, however it is viewed."""
    return any(at is not None and is_weight(arg) for arg, at in zip(operands, wanted, strict=True))


def is_weight(node: fx.Node) -> bool:
    """Whether `node` is a parameter, or made of one alone by views, casts and other ops of one operand."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return bool(node.meta.get(PARAMETER))


def is_of_model(node: fx.Node) -> bool:
    """Whether a parameter reaches `node`, be it frozen."""
    return any(each.meta.get(PARAMETER) for each in inputs_above(node))


def is_learned(node: fx.Node) -> bool:
    """Whether only parameters and constants reach `node`, parameters among them."""
    given = inputs_above(node)
    return bool(given) and all(each.meta.get(PARAMETER) for each in given)


def is_constant(node: fx.Node) -> bool:
    """Whether nothing that the caller passes reaches `node`: but parameters and buffers of the model, and constants."""
    return all(each.meta.get(PARAMETER) or each.meta.get(OF_PROGRAM) for each in inputs_above(node))


def inputs_above(node: fx.Node) -> list[fx.Node]:
    """The tensors among the inputs that reach `node`."""
    found, seen, stack = list[fx.Node](), {node}, [node]
    while stack:
        each = stack.pop()
        if each.op == "placeholder" and is_tensor(each):
            found.append(each)
        for above in each.all_input_nodes:
            if above not in seen:
                seen.add(above)
                stack.append(above)
    return found
