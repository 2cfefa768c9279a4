"""From Dynamo's graph to one flat pre-dispatch ATen graph.

There scaled_dot_product_attention, linear, layer_norm and cross_entropy_loss are still whole and autograd is still
above: AOTAutograd derives the backward from what the passes leave. Running the captured graph equals eager bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback

from ringopt.calls import OpCall
from ringopt.frontend import flex
from ringopt.frontend.dtensors.local_graph import DTensorBoundary, has_dtensors, with_local_tensors
from ringopt.frontend.dynamic_shapes import open_value
from ringopt.frontend.explicit_autocast import autocast_around
from ringopt.frontend.flatten import Book, Custom, Flatten, refuse_higher_order
from ringopt.frontend.flex_block_masks import Claim, claims, erase_tables
from ringopt.frontend.func_transforms import with_transforms_as_calls
from ringopt.frontend.one_node import with_facts_of_graphs
from ringopt.ir.autograd_function import CustomGradient, GradientArguments, HigherOrder
from ringopt.ir.checkpoint_regions import Regions
from ringopt.ir.memory import note_memory
from ringopt.ir.nodes import outputs_of, readable_name, value_of
from ringopt.ir.notes import CONTENT, INPUT, OF_PROGRAM, PARAMETER, SOURCE, STRIDES
from ringopt.ir.real_strides import RealStrides
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.symbolic_sizes import SymbolPlaces, into_arguments
from ringopt.ops import operators
from ringopt.pipeline import Context
from ringopt.tensor.lazy import Lazy
from ringopt.torch_compat import dynamo
from ringopt.torch_compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from ringopt.torch_compat.fx import lazily_written, make_fx, rename_node
from ringopt.torch_compat.symbolic_shapes import ShapeEnv
from ringopt.torch_compat.tensors import is_traceable_wrapper_subclass, storage_key
from ringopt.torch_compat.tracing import tracing


@dataclass(frozen=True)
class Captured:
    """A flat graph; its regions that are checkpointed; what it takes for granted of block tables among its inputs; what
    stands around it where the program has DTensors."""

    graph: fx.GraphModule
    regions: Regions
    claims: Sequence[Claim]
    around: DTensorBoundary = field(default_factory=DTensorBoundary)

    def begin(self, context: Context) -> fx.GraphModule:
        """The graph; what is known of it goes into `context`."""
        context.values, context.regions = known(self.graph), self.regions
        return self.graph


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], shape_env: ShapeEnv | None = None) -> Captured:
    """The flat ATen graph of `gm`, Dynamo's or an exported program's, with the same placeholders in the same order.

    Sizes are those of `example_inputs`; with a `shape_env`, that of `gm`, those that it left open stay so, and stand in
    the arguments of nodes (ringopt/ir/symbolic_sizes.py). Raises GraphRefused for what cannot be flattened without
    losing a gradient.
    """
    program, (gm, around) = gm, with_local_tensors(gm) if has_dtensors(gm) else (gm, DTensorBoundary())
    example_inputs = around.entering(example_inputs)
    refuse_wrapped(gm, example_inputs)
    claimed = claims_of_flex(gm, example_inputs)
    given, gm = gm, without_tables(gm) if claimed else gm
    gm = with_transforms_as_calls(gm)
    refuse_higher_order(gm)
    # A mode of our own, outside Dynamo's tracing context: the fakes of the two must not meet.
    mode = RealStrides(allow_non_fake_inputs=True, shape_env=shape_env)
    seen = zip(given.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    inputs = [
        like(fake(open_value(node, value), mode), value) if shape_env is not None else fake(value, mode)
        for node, value in seen
    ]
    with tracing(None), mode, torch.fx.traceback.preserve_node_meta():
        flex.with_mods(gm, lambda value: fake(value, mode))
        flat, regions = flatten(gm, inputs)
    into_arguments(flat.graph)
    note_strides(flat.graph)
    note_memory(flat.graph)
    originals = program.graph.find_nodes(op="placeholder")
    placeholders = zip(flat.graph.find_nodes(op="placeholder"), originals, example_inputs, inputs, strict=True)
    for node, original, given, value in placeholders:
        node.meta[INPUT], node.meta[SOURCE] = original.name, source_of(original)
        node.meta[PARAMETER] = isinstance(given, torch.nn.Parameter) or "_parameters_" in original.name
        node.meta[OF_PROGRAM] = belongs_to_program(original)
        if not node.meta[PARAMETER] and _holds_numbers(given) and node.meta[OF_PROGRAM]:
            node.meta[CONTENT] = given
        rename_node(node, readable_name(original.name))
        node.target = node.name
        node.meta["val"] = value  # not the tracer's snapshot of it, which has lost requires_grad
    return Captured(flat, regions, claimed, around)


def like(value: Any, given: Any) -> Any:
    """What stands for an input, a leaf or not and with a gradient or not as the input is: to a leaf nothing may be
    written in place, as to a value that crosses a graph break. (Dynamo's own value of an open size is a leaf, and has
    a gradient once the graph has written to it what has.)"""
    if not isinstance(given, torch.Tensor) or not value.is_leaf:
        return value
    value.requires_grad_(given.requires_grad)
    if given.is_leaf or 0 in value.stride():  # (to what is expanded nobody writes)
        return value
    with torch.enable_grad():
        return value.new_empty_strided(value.shape, value.stride()).copy_(value)


def note_strides(graph: fx.Graph) -> None:
    """How the outputs lie in memory, by place: what the passes put there may lie in another order, and views that the
    caller makes of it depend on that."""
    values = map(value_of, outputs_of(graph))
    strides = [value.stride() if isinstance(value, torch.Tensor) else None for value in values]
    graph.output_node().meta[STRIDES] = strides


def refuse_wrapped(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raises GraphRefused for tensors of another class than torch's own (DTensors are local tensors here), and for
    lists of tensors, which no program gives but the backward of compiled autograd."""
    given = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    made = ((node, node.meta.get("example_value")) for node in gm.graph.nodes if node.op == "call_function")
    for node, value in (*given, *made):
        if is_traceable_wrapper_subclass(value) and not isinstance(value, Lazy):
            why = (
                f"{readable_name(node.name)} is a {type(value).__name__}: what operators do with a tensor of that "
                "class is not known, and the graph runs as it was"
            )
            raise GraphRefused(Refusal(why, node))
        if node.op == "placeholder" and isinstance(value, list):
            why = "a backward of compiled autograd runs as it is, on what its forward left"
            raise GraphRefused(Refusal(why, node))


def claims_of_flex(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Claim]:
    """What is taken for granted of the block tables of flex_attention. Raises GraphRefused."""
    for node in flex.flex_nodes(gm.graph):
        refusal = flex.refusal_of_flex(node)
        if refusal is not None:
            raise GraphRefused(refusal)
    found = claims(gm)
    if isinstance(found, Refusal):
        raise GraphRefused(found)
    for node, claim in zip(flex.flex_nodes(gm.graph), found, strict=True):
        if claim.readable(example_inputs) and not claim.holds(example_inputs):
            why = (
                "the block tables of flex_attention do not say what mask_mod says: a block that they leave out is not "
                "hidden whole by it, or one that they list as full is not seen whole"
            )
            raise GraphRefused(Refusal(why, node))
    return found


def without_tables(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph in which nothing makes block tables."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    erase_tables(graph)
    return fx.GraphModule(gm, graph)


def source_of(node: fx.Node) -> str:
    """Where Dynamo has an input from, as an expression of the program; "" where that is not known."""
    if SOURCE not in node.meta:  # noted, because Dynamo takes it away after its backend has run
        node.meta[SOURCE] = dynamo.source_of(node)
    return str(node.meta[SOURCE])


def belongs_to_program(node: fx.Node) -> bool:
    """Whether an input of Dynamo's graph is a tensor of the model (a buffer, an attribute) or of its file; not one that
    the caller passes, nor a float (a temperature) that was left open because it changes."""
    if OF_PROGRAM not in node.meta:  # noted, because Dynamo takes the source away after its backend has run
        where = dynamo.guard_source_of(node)
        node.meta[OF_PROGRAM] = "NN_MODULE" in where or where.startswith("GLOBAL")
    return bool(node.meta[OF_PROGRAM])


def _holds_numbers(value: Any) -> bool:
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.device.type != "meta"
    return real and not value.requires_grad


def known(flat: fx.GraphModule) -> dict[fx.Node, torch.Tensor]:
    """Tensors that are part of the program, by node: constants of the graph, buffers and attributes of the model."""
    constants = {node: getattr(flat, node.target, None) for node in flat.graph.find_nodes(op="get_attr")}
    inputs = {node: node.meta.get(CONTENT) for node in flat.graph.find_nodes(op="placeholder")}
    return {node: value for node, value in (constants | inputs).items() if isinstance(value, torch.Tensor)}


def flatten(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, Regions]:
    """The flat graph of `gm`, functions of torch.autograd included, and the regions that are checkpointed.
    Raises GraphRefused where a number or a size depends on data."""
    book = Book(inputs=frozenset(storage_key(x) for x in inputs if isinstance(x, torch.Tensor)))
    try:
        flat = traced(partial(begun, gm, book), inputs)
        around = autocast_around(flat)
        for node in flat.graph.find_nodes(op="call_function", target=operators.custom_gradient.default):
            custom = book.customs[OpCall.of(node)["number"]]
            if isinstance(custom, HigherOrder):
                put_whole(node, custom if node not in around else custom.inside(around[node]))
            else:
                give_gradient(node, custom)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = f"a number or a size made by {error.func} is known only when the program runs; all sizes must be fixed"
        raise GraphRefused(Refusal(why)) from error
    flat.recompile()
    return flat, book.regions


def begun(gm: fx.GraphModule, book: Book, *args: Any) -> Any:
    """Runs `gm` on inputs that a tracer knows."""
    book.symbols.update(SymbolPlaces.of(args).values(args))
    return Flatten(gm, book).run(*args)


def traced(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph whose Python code is written when it is run or read, and not after every pass."""
    with lazily_written():
        return make_fx(function, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)


def give_gradient(node: fx.Node, custom: Custom) -> None:
    """Puts a CustomGradient in the place of the operator that stood for it. Only operands that its backward has a
    gradient for are its inputs."""
    tensors = [place for place, x in enumerate(custom.inputs) if isinstance(x, torch.Tensor)]
    values = (*(custom.outputs[k] for k in custom.differentiable), *custom.saved)
    given = [torch.empty_like(value) for value in values if isinstance(value, torch.Tensor)]
    learned: list[int] = []

    def gradients(*values: torch.Tensor) -> list[torch.Tensor]:
        found = custom.gradients(*values)
        of_tensors = [(k, found[place]) for k, place in enumerate(tensors)]
        learned.extend(k for k, gradient in of_tensors if gradient is not None)
        return [gradient for _, gradient in of_tensors if gradient is not None]

    backward = traced(gradients, given)
    for placeholder, value in zip(backward.graph.find_nodes(op="placeholder"), given, strict=True):
        placeholder.meta["val"] = value
    call = OpCall.of(node)
    inputs = [call["inputs"][k] for k in learned]
    node.target, node.args = CustomGradient(backward), tuple(GradientArguments(call["outputs"], inputs, call["saved"]))


def put_whole(node: fx.Node, call: HigherOrder) -> None:
    """Puts a higher-order call in the place of the operator that stood for it. Raises GraphRefused."""
    stand_in = OpCall.of(node)
    like, tensors = stand_in["outputs"], stand_in["inputs"]
    node.target, node.args = with_facts_of_graphs(call, [value_of(x) for x in tensors], node), (tensors,)
    rename_node(node, call.__name__)
    for memory in like:
        node.graph.erase_node(memory)


def fake(value: Any, mode: FakeTensorMode) -> Any:
    """A fake of a tensor; without a ShapeEnv, a symbolic size becomes the number it stands for."""
    if isinstance(value, torch.SymInt):
        return int(value) if mode.shape_env is None else value
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (FakeTensor, Lazy)):  # of Dynamo, of an exported program, of a dry run; or rows that arrive
        sizes, strides = list(value.shape), list(value.stride())
        if mode.shape_env is None:
            sizes, strides = [int(size) for size in sizes], [int(stride) for stride in strides]
        with mode:
            copy = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return copy.requires_grad_(value.requires_grad)
    return mode.from_tensor(value, static_shapes=True)
