"""Dynamo's graph, run for the tracer: regions that are functions of their own are written out in line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback
from torch._ops import HigherOrderOperator

from ringopt.graph import flex
from ringopt.graph.decompose import DECOMPOSED, is_whole_layer
from ringopt.graph.recompute import Regions, tags
from ringopt.graph.refusal import Refusal
from ringopt.pipeline import GraphRefused

HIGHER_ORDER = {
    "flex_attention": "flex_attention inside a region of a program is not sharded yet",
    "autograd_function_apply": "a custom autograd.Function is not sharded yet: flattening it would lose its backward",
}

# Regions by name, with the context they run in, which their first arguments make.
CONTEXTS: dict[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": torch.set_grad_enabled,
    "wrap_with_autocast": torch.autocast,
}
CHECKPOINT = "tag_activation_checkpoint"
INLINE = (*CONTEXTS, CHECKPOINT)


class Flatten(fx.Interpreter):
    """Also runs operators that hold a whole layer as their parts. `region` is the number of the checkpointed one around
    this graph."""

    def __init__(self, gm: fx.GraphModule, regions: Regions, region: int | None = None):
        super().__init__(gm)
        self.regions, self.region = regions, region

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.tag()
        if is_whole_layer(target, kwargs, args):
            return DECOMPOSED[target](*args, **kwargs)
        if is_inline(target):
            return self.run_inline(target.name(), args)
        if flex.is_flex(target):
            return flex.written_out(*args)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.tag()
        return super().call_method(target, args, kwargs)

    def tag(self) -> None:
        """What is traced from here to the end of this node is of the region."""
        if self.region is not None:
            torch.fx.traceback.get_current_meta().update(tags(self.region))

    def run_inline(self, name: str, args: tuple[Any, ...]) -> Any:
        """`args` are those of the context, then the region's graph, then the graph's."""
        at = next(k for k, value in enumerate(args) if isinstance(value, fx.GraphModule))
        gm, operands, region = args[at], args[at + 1 :], self.region
        if name == CHECKPOINT:
            entered = self.regions.enter(gm.meta.get("_checkpoint_context_fn"), self.region)
            if isinstance(entered, Refusal):
                raise GraphRefused(entered)
            region = entered
        inner = Flatten(gm, self.regions, region)
        if name not in CONTEXTS:
            return inner.run(*operands)
        with CONTEXTS[name](*args[:at]):
            return inner.run(*operands)


def is_inline(target: Any) -> bool:
    return isinstance(target, HigherOrderOperator) and target.name() in INLINE


def refuse_higher_order(gm: fx.GraphModule) -> None:
    """Raises GraphRefused for what cannot be written out in line without losing a gradient."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            understood = is_inline(node.target) or (flex.is_flex(node.target) and module is gm)
            if isinstance(node.target, HigherOrderOperator) and not understood:
                name = node.target.name()
                why = HIGHER_ORDER.get(name, f"the higher-order operator {name} is not sharded yet")
                raise GraphRefused(Refusal(why, node))
            if flex.is_functorch(node):
                raise GraphRefused(Refusal("torch.func transforms such as vmap are not sharded yet", node))
