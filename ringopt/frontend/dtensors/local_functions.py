"""What a program does with DTensors, as a function of local tensors: a graph for its values, and one for its gradients.

    y = from_local(x, mesh, [Shard(-1)]) @ w          ->    y = all_reduce(x @ w_local)
    y = y.redistribute(mesh, [Replicate()]).to_local()      dx, dw_local = dy @ w_local.T, x.T @ dy

Both are traced from torch's own DTensor, so that which messages are sent, and what is done with a gradient, is for it
to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringopt.ir.nodes import draws, is_write, written_by_name
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import get_decompositions, make_fx
from ringopt.torch_compat.pytree import tree_map
from ringopt.torch_compat.tensors import storage_key

Run = Callable[..., Tensor]

# Written as sums and products: below autograd norms are other operators than above it, for which ringopt/dims has no
# rules.
NORMS = ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward")


@dataclass(frozen=True)
class LocalFunction:
    """`forward(*operands)` gives ([result], saved), and `backward(gradient, *saved)` the gradient of each operand or
    None: the two graphs of a custom autograd.Function of Dynamo's. Without a `backward`, where no operand has a
    gradient, `forward` gives (result,). `result`: fake, as local tensors go."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    result: Tensor


def local_function(
    nodes: Sequence[fx.Node], operands: Sequence[fx.Node], constants: dict[fx.Node, Any]
) -> LocalFunction:
    """Of `nodes` of Dynamo's graph, in order, the last of which gives one tensor; `operands` are the tensors that they
    read, DTensors or not, and `constants` what else. Raises GraphRefused."""
    run, last = partial_run(nodes, operands, constants), nodes[-1]
    examples = [local_example(operand) for operand in operands]  # of Dynamo's fake mode
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [like(x) for x in examples]
        with torch.no_grad():
            forward = functional(run, given)
        if any(is_write(node) or draws(node) for node in forward.graph.nodes if node.op == "call_function"):
            raise GraphRefused(Refusal("a DTensor is written to in place, or random numbers are drawn for it", last))
        with torch.no_grad():
            result = run(*given)
        if storage_key(result) in map(storage_key, given) and any(map(written_by_name, last.graph.nodes)):
            why = "a DTensor has the memory of a tensor beside it, and something is written to in place"
            raise GraphRefused(Refusal(why, last))
        learned = [k for k, x in enumerate(given) if x.requires_grad]
        if not learned or not example_of(last).requires_grad:
            end = forward.graph.output_node()
            end.args = ((end.args[0],),)
            forward.recompile()
            return LocalFunction(forward, None, result)

        def gradients(gradient: Tensor, *values: Tensor) -> list[Tensor | None]:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_(k in learned) for k, x in enumerate(values)]
                found = torch.autograd.grad(run(*leaves), [leaves[k] for k in learned], gradient, allow_unused=True)
            of = dict(zip(learned, found, strict=True))
            return [of.get(k) for k in range(len(values))]

        backward = functional(gradients, [torch.empty_like(result), *given])
    backward.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return LocalFunction(*joined(forward, backward), result)


def functional(run: Callable[..., Any], given: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a call, in which only what `given` holds is written to, and norms are sums and products."""
    traced = make_fx(run)(*given)
    in_parts = get_decompositions([op for name in NORMS if (op := getattr(torch.ops.aten, name, None)) is not None])
    return make_fx(torch.func.functionalize(traced, remove="mutations"), decomposition_table=in_parts)(*given)


def partial_run(nodes: Sequence[fx.Node], operands: Sequence[fx.Node], constants: dict[fx.Node, Any]) -> Run:
    """`nodes` as a function of the local tensors of `operands`; so is its result."""

    def run(*given: Tensor) -> Tensor:
        values = dict(constants)
        for node, x in zip(operands, given, strict=True):
            like = example_of(node)
            values[node] = spread_as(like, x) if isinstance(like, DTensor) else x
        for node in nodes:
            args, kwargs = tree_map(lambda x: values[x] if isinstance(x, fx.Node) else x, (node.args, node.kwargs))
            call = getattr(args[0], node.target) if node.op == "call_method" else node.target
            values[node] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
        found = values[nodes[-1]]
        result: Tensor = found.to_local() if isinstance(found, DTensor) else found
        return result

    return run


def example_of(node: fx.Node) -> Any:
    """The fake value that Dynamo has noted."""
    return node.meta.get("example_value")


def local_example(node: fx.Node) -> Tensor:
    """Of a value, the local tensor."""
    value: Tensor = example_of(node)
    return value.to_local() if isinstance(value, DTensor) else value


def like(x: Tensor) -> Tensor:
    """A leaf of the fake mode around, with open sizes as they are at hand."""
    sizes, strides = list(map(int, x.shape)), list(map(int, x.stride()))
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


def spread_as(like: DTensor, local: Tensor) -> DTensor:
    """The DTensor of which `local` is this rank's."""
    shape, stride = torch.Size(map(int, like.shape)), tuple(map(int, like.stride()))
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def joined(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward returns what the backward reads of its operands, too; the others are no arguments of the backward."""
    places = backward.graph.find_nodes(op="placeholder")[1:]
    kept = [k for k, node in enumerate(places) if node.users]
    for node in places:
        if not node.users:
            backward.graph.erase_node(node)
    operands, end = forward.graph.find_nodes(op="placeholder"), forward.graph.output_node()
    end.args = (((end.args[0],), tuple(operands[k] for k in kept)),)
    for made in (forward, backward):
        made.recompile()
    return forward, backward
