"""Parameters that no branch used have no gradient, as in eager: what is computed always (predication.py) would give
them zeros, with which an optimizer decays them.

    for e in hit: y += expert[e](x)        ->      outputs + [hit[0], hit[1], ...]     # read in the backward
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.frontend.data_sizes.branches import Predicated
from ringopt.frontend.data_sizes.fake_values import fake_value, memory
from ringopt.torch_compat.autograd import never_compiled

Conditions = Mapping[int, Sequence[int]]  # by input, which of the last outputs: one of them has to hold


def take_conditions(gm: fx.GraphModule, branches: Sequence[Predicated]) -> Conditions:
    """Of the inputs of Dynamo's graph that are used in branches alone; they are its last outputs from here on."""
    inputs = gm.graph.find_nodes(op="placeholder")
    used = {place: found for place, x in enumerate(inputs) if (found := uses(x, branches))}
    needed = list(dict.fromkeys(branch for found in used.values() for branch in found))
    if not needed:
        return {}
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        held = [gm.graph.call_method("clone", (branch.truth,)) for branch in needed]  # which nobody writes to
    for made, branch in zip(held, needed, strict=True):
        made.meta.update(example_value=fake_value(branch.truth).clone())
    output.args = ((*output.args[0], *held),)
    gm.recompile()
    return {place: [needed.index(branch) - len(needed) for branch in found] for place, found in used.items()}


def uses(x: fx.Node, branches: Sequence[Predicated]) -> list[Predicated]:
    """The branches that use it, or what is made of it; none where anything else does, or where it is written: that has
    to be done to the caller's own tensor."""
    value = fake_value(x)
    if not isinstance(value, Tensor) or not value.requires_grad or not branches:
        return []
    if memory(x) in branches[0].program.written:
        return []
    found, pending, owner = dict[Predicated, None](), [x], branches[0].owner
    while pending:
        node = pending.pop()
        for user in node.users:
            goes_on = user in owner and owner[user].adds_nothing(user) and user.args[0] is node  # taken or not
            if user in owner and not goes_on:
                found[owner[user]] = None
            elif user.op == "output":
                return []
            else:
                pending.append(user)
    return list(found)


def gradients_where_taken(run: Callable[..., Any], conditions: Conditions) -> Callable[..., Any]:
    """`run`, whose last outputs are conditions: an input has no gradient where none of its own holds."""
    count = -min((place for places in conditions.values() for place in places), default=0)

    def gated(*inputs: Any) -> Any:
        taken, given = Taken(), list(inputs)
        for place, its_own in conditions.items():
            if given[place].requires_grad and torch.is_grad_enabled():
                given[place] = WhereTaken.apply(given[place], taken, its_own)  # type: ignore[no-untyped-call]
        outputs = run(*given)
        taken.held = outputs[len(outputs) - count :]
        return outputs[: len(outputs) - count]

    return gated if conditions else run


class Taken:
    """The conditions of one call, read once for all inputs."""

    def __init__(self) -> None:
        self.held: Sequence[Tensor] = ()
        self.known: list[bool] | None = None

    def any_of(self, conditions: Sequence[int]) -> bool:
        if self.known is None:
            self.known = torch.stack([x.detach() for x in self.held]).tolist()
        return any(self.known[place] for place in conditions)


class WhereTaken(torch.autograd.Function):
    """An input as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: Taken, conditions: Sequence[int]) -> Tensor:
        ctx.taken, ctx.conditions = taken, conditions
        return x.detach()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0] if ctx.taken.any_of(ctx.conditions) else None), None, None
