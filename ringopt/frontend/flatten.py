"""Dynamo's graph, run for the tracer: regions that are functions of their own are written out in line.

A custom autograd.Function is two such regions: its forward is written out on detached operands, its backward is traced
by itself, and a node between them holds the gradient (ir/autograd_function.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import sympy
import torch
import torch.fx as fx
import torch.fx.traceback
import torch.nn.functional as F
from torch import Tensor

from ringopt.frontend import flex
from ringopt.frontend.fused_attention import kernel_taken_apart
from ringopt.frontend.fused_layers import DECOMPOSED, is_whole_layer
from ringopt.frontend.one_node import (
    fixed_sizes,
    graphs_of,
    held_call,
    not_sharded,
    reason_against,
    refuse_views,
    stays_open,
    traced_sizes,
)
from ringopt.ir.autograd_function import HigherOrder
from ringopt.ir.checkpoint_regions import Regions, tags
from ringopt.ir.memory import is_one_view
from ringopt.ir.nodes import drops_nothing
from ringopt.ir.notes import CHECKPOINTED
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ops import operators
from ringopt.ops.torch_func import vmapped
from ringopt.torch_compat.autograd import ENTER_INFERENCE_MODE, EXIT_INFERENCE_MODE, GET_DATA
from ringopt.torch_compat.operators import GIVES_MEMORY
from ringopt.torch_compat.schema import HigherOrderOperator
from ringopt.torch_compat.tensors import storage_key, version_of

HIGHER_ORDER = {"flex_attention": "flex_attention inside a region of a program is not sharded yet"}

# Regions by name, with the context they run in, which their first arguments make.
CONTEXTS: dict[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": torch.set_grad_enabled,
    "wrap_with_autocast": torch.autocast,
}
CHECKPOINT, CUSTOM, NESTED = "tag_activation_checkpoint", "autograd_function_apply", "invoke_subgraph"
INLINE = (*CONTEXTS, CHECKPOINT, CUSTOM, NESTED)

# Functions of torch that take two numbers as well, of which they make a tensor; operators do not.
OF_NUMBERS = frozenset(
    (torch.add, torch.sub, torch.subtract, torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide,
     torch.floor_divide)
)  # fmt: skip


@dataclass(frozen=True)
class Custom:
    """One call of a custom autograd.Function: its backward, and the values that this is given and gives gradients of.

    outputs         all results of the forward, fake
    differentiable  which of them have a gradient
    saved           what the forward keeps: fake tensors and numbers
    inputs          the operands: fake tensors and numbers
    """

    backward: fx.GraphModule
    outputs: Sequence[Any]
    differentiable: Sequence[int]
    saved: Sequence[Any]
    inputs: Sequence[Any]

    def gradients(self, *given: Tensor) -> list[Tensor | None]:
        """Of each operand, from the gradients of the differentiable outputs and the saved tensors. As autograd does it:
        the gradient of any other output is zeros, and that of an operand that was broadcast is summed."""
        values = iter(given)
        of_outputs = [
            next(values) if place in self.differentiable else torch.zeros(y.shape, dtype=y.dtype, device=y.device)
            for place, y in enumerate(self.outputs)
        ]
        saved = [next(values) if isinstance(value, Tensor) else value for value in self.saved]
        book = Book()
        found = Flatten(self.backward, book).run(*of_outputs, *saved)
        if any(isinstance(each, HigherOrder) for each in book.customs):
            raise GraphRefused(Refusal("a higher-order operator in a backward of its own is not sharded yet"))
        return [
            summed_to(gradient, x.shape) if isinstance(gradient, Tensor) else gradient
            for gradient, x in zip(found, self.inputs, strict=True)
        ]


def summed_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of a value of `shape` that was broadcast."""
    leading = gradient.dim() - len(shape)
    if leading:
        gradient = gradient.sum(list(range(leading)))
    spread = [dim for dim, size in enumerate(shape) if size == 1 and gradient.shape[dim] != 1]
    return gradient.sum(spread, keepdim=True) if spread else gradient


def as_tensor(number: Any) -> Tensor:
    """What stands for it where it meets another number: a constant, of which a size can be made."""
    floats = isinstance(number, (float, torch.SymFloat))
    kind = torch.get_default_dtype() if floats else torch.bool if isinstance(number, bool) else torch.int64
    made = torch.tensor if isinstance(number, (int, float)) else torch.scalar_tensor
    return made(number, dtype=kind)


@dataclass
class Book:
    """What is noted of one graph while it is flattened. `inputs`: their memory; `symbols`: sizes of theirs."""

    regions: Regions = field(default_factory=Regions)
    customs: list[Custom | HigherOrder] = field(default_factory=list)
    inputs: frozenset[int] = frozenset()
    symbols: dict[sympy.Symbol, Any] = field(default_factory=dict)


class Flatten(fx.Interpreter):
    """Also runs operators that hold a whole layer as their parts. `region` is the number of the checkpointed one around
    this graph."""

    def __init__(self, gm: fx.GraphModule, book: Book, region: int | None = None):
        super().__init__(gm)
        self.book, self.region = book, region

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.tag()
        if target in UNCHANGED and UNCHANGED[target](*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if is_whole_layer(target, kwargs, args):
            return DECOMPOSED[target](*args, **kwargs)
        if (results := kernel_taken_apart(self.running, args, kwargs)) is not None:
            return results
        if is_inline(target):
            return self.run_inline(target.name(), args, kwargs)
        if flex.is_flex(target):
            return flex.written_out(*args)
        if isinstance(target, HigherOrderOperator):
            return vmapped(target, args) or self.run_whole(target, args, kwargs)
        if target is GET_DATA:
            return args[0].detach()  # x.data, which the tracer would take for a constant
        if target in OF_NUMBERS and isinstance(args[0] if args else None, (int, float, torch.SymInt, torch.SymFloat)):
            args = (as_tensor(args[0]), *args[1:])
        if target is ENTER_INFERENCE_MODE:
            return torch.set_grad_enabled(not args[0])  # this the tracer notes
        if target is EXIT_INFERENCE_MODE:
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.running = n
        return super().run_node(n)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.tag()
        if target == "set_" and is_one_view(*args, **kwargs):
            return args[0]
        return super().call_method(target, args, kwargs)

    def tag(self) -> None:
        """What is traced from here to the end of this node is of its region."""
        if (region := self.region_here()) is not None:
            torch.fx.traceback.get_current_meta().update(tags(region))

    def region_here(self) -> int | None:
        """Of the node that runs. Raises GraphRefused."""
        call = self.running.meta.get(CHECKPOINTED)
        region = self.book.regions.entered(call, self.region) if call is not None else self.region
        if isinstance(region, Refusal):
            raise GraphRefused(region)
        return region

    def run_inline(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`args` are those of the context, then the region's graph, then the graph's."""
        if name == CUSTOM:
            return self.run_custom(kwargs["non_differentiable_idx"], kwargs.get("dirty_idx", ()), *args)
        at = next(k for k, value in enumerate(args) if isinstance(value, fx.GraphModule))
        gm, operands, region = args[at], args[at + 1 :], self.region_here()
        if name == CHECKPOINT:
            entered = self.book.regions.enter(gm.meta.get("_checkpoint_context_fn"), region)
            if isinstance(entered, Refusal):
                raise GraphRefused(entered)
            region = entered
        if name == NESTED:
            operands = operands[1:]  # after the name of the region
        with CONTEXTS[name](*args[:at]) if name in CONTEXTS else nullcontext():
            return Flatten(gm, self.book, region).run(*operands)

    def run_custom(
        self,
        constant: Sequence[int],
        dirty: Sequence[int],
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        *operands: Any,
    ) -> Any:
        """`constant`: which outputs the Function marks as not differentiable; `dirty`: which are operands that it
        writes to. It writes to copies; the operands are written with what has its gradient."""
        given = [x for x in operands if isinstance(x, Tensor)]
        written = written_by(forward, dirty, operands)
        self.refuse_shared(list(written.values()), given)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in operands]
        detached = [x.clone() if place in written else x for place, x in enumerate(detached)]
        versions = [version_of(x) for x in given]
        outputs, saved = Flatten(forward, self.book, self.region_here()).run(*detached)
        if versions != [version_of(x) for x in given]:
            raise GraphRefused(Refusal("a custom autograd.Function writes to its input without saying so (mark_dirty)"))
        outputs = list(outputs)
        of_numbers = [k for k, y in enumerate(outputs) if y.is_floating_point() or y.is_complex()]
        differentiable = [k for k in of_numbers if k not in constant]
        kept = [x for x in saved if isinstance(x, Tensor)]
        self.book.customs.append(Custom(backward, outputs, differentiable, saved, operands))
        called = operators.custom_gradient(
            [outputs[k] for k in differentiable], given, kept, len(self.book.customs) - 1
        )
        for k, y in zip(differentiable, called, strict=True):
            outputs[k] = y
        for k, x in zip(dirty, written.values(), strict=True):
            outputs[k] = x.copy_(outputs[k])
        return tuple(outputs)

    def run_whole(self, operator: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """A higher-order operator as one node, which gives tensors of the kinds that Dynamo has found."""
        refuse_views(self.running, partial(_graph_or_example, self.module))
        call, tensors = held_call(operator, args, kwargs, self.running)
        expected = flex.example(self.running)
        several = type(expected) if isinstance(expected, (tuple, list)) else None
        sizes = partial(traced_sizes, known=self.book.symbols) if stays_open(operator, tensors) else fixed_sizes
        like = [
            torch.empty_strided(*sizes(x), dtype=x.dtype, device=x.device)
            for x in (expected if several else [expected])
        ]
        self.book.customs.append(call)
        made = operators.custom_gradient(like, tensors, [], len(self.book.customs) - 1)
        return several(made) if several else made[0]

    def refuse_shared(self, written: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
        """Raises GraphRefused where who else has the memory that a Function writes to would not see it written."""
        memory = [storage_key(x) for x in operands]
        for x in written:
            if storage_key(x) in self.book.inputs:
                why = "a custom autograd.Function writes to an input of the graph (mark_dirty)"
                raise GraphRefused(Refusal(why))
            if memory.count(storage_key(x)) > 1:
                why = "a custom autograd.Function writes to an input that shares memory with another one (mark_dirty)"
                raise GraphRefused(Refusal(why))


def drops_none(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> bool:
    """As dropout is called, in any of its spellings; a `p` that is no probability is its error."""
    return 0 <= p <= 1 and drops_nothing(p, training and train)


# Whether it returns its operand as that was: of dropout the tracer would have a copy, of `x.data = x.data` a write.
DROPOUTS = (F.dropout, torch.dropout, torch.ops.aten.dropout.default)
UNCHANGED: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys(DROPOUTS, drops_none),
    **dict.fromkeys(GIVES_MEMORY.values(), is_one_view),
}


def written_by(forward: fx.GraphModule, dirty: Sequence[int], operands: Sequence[Any]) -> dict[int, Tensor]:
    """Of the forward of a Function, the operands that are its outputs `dirty`, by place."""
    places = forward.graph.find_nodes(op="placeholder")
    outputs = forward.graph.output_node().args[0][0]
    return {(at := places.index(outputs[k])): operands[at] for k in dirty}


def is_inline(target: Any) -> bool:
    """Whether a higher-order operator's graph is flattened into the graph around it."""
    return isinstance(target, HigherOrderOperator) and target.name() in INLINE


def refuse_higher_order(gm: fx.GraphModule, inside: bool = False) -> None:
    """Raises GraphRefused for what can neither be written out in line without losing a gradient, nor be one node.
    `inside`: of a region of a program."""
    for node in gm.graph.nodes:
        if flex.calls_functorch(node):
            sentence = "a torch.func transform that uses forward-mode gradients (jvp, hessian) is not sharded yet"
            raise GraphRefused(Refusal(sentence, node))
        if node.target is torch.autograd.grad:
            sentence = (
                "a gradient that is taken within a graph is not sharded; without trace_autograd_ops of "
                "torch._dynamo.config the graph ends there, and is"
            )
            raise GraphRefused(Refusal(sentence, node))
        if is_inline(node.target) and node.target.name() == CUSTOM:
            _refuse_custom(node)
        if is_inline(node.target) or node.op == "call_module":
            graphs = [_graph_or_example(gm, arg) for arg in node.all_input_nodes]
            graphs += [gm.get_submodule(node.target)] if node.op == "call_module" else []
            for graph in graphs:
                if isinstance(graph, fx.GraphModule):
                    refuse_higher_order(graph, True)
        elif isinstance(node.target, HigherOrderOperator) and (inside or not flex.is_flex(node.target)):
            name = node.target.name()
            why = reason_against(node, partial(_graph_or_example, gm))
            if why is not None or name in HIGHER_ORDER:
                known = HIGHER_ORDER.get(name)
                raise GraphRefused(Refusal(known, node) if known else not_sharded(name, str(why), node))


def _graph_or_example(gm: fx.GraphModule, value: Any) -> Any:
    """What a node of Dynamo's graph stands for."""
    if isinstance(value, fx.Node) and value.op == "get_attr":
        return attrgetter(str(value.target))(gm)
    return flex.example(value)


def has_custom(gm: fx.GraphModule) -> bool:
    """Whether a custom autograd.Function is called anywhere in a graph of Dynamo's."""
    nodes = (node for graph in graphs_of(gm) for node in graph.nodes)
    return any(is_inline(node.target) and node.target.name() == CUSTOM for node in nodes)


def _refuse_custom(node: fx.Node) -> None:
    if "saved_for_backward_idx" not in node.kwargs:
        why = "a custom autograd.Function is captured by this version of torch in a form that is not known here"
        raise GraphRefused(Refusal(why, node))
