"""flex_attention as Dynamo writes it, and as plain ATen.

    flex_attention(q, k, v, score_mod, (..., tables, ..., mask_mod), scale, options, buffers, buffers)
        ->
    product = q @ k.mT
    scores = where(mask_mod(b, h, q, k), score_mod(product * scale, b, h, q, k), -inf)
    ringopt::flex(q, k, v, product, scores)

score_mod and mask_mod are graphs over single numbers; vmap makes them graphs over [B, H, Sq, Sk], as torch's own
definition does. No tensor of that size exists: the graph is read, not run. The block tables are not part of it: they
only repeat what mask_mod says (ringopt/frontend/flex_block_masks.py checks that), and what makes them is taken out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.ops import operators
from ringopt.torch_compat import schema
from ringopt.torch_compat.dynamo import TransformGetItemToIndex, is_batchedtensor
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.operators import TO_COPY
from ringopt.torch_compat.schema import HigherOrderOperator

aten = torch.ops.aten


@dataclass(frozen=True)
class FlexArgs:
    """The arguments of the operator: nodes in a graph, values when it is run.

    block_mask   Sq, Sk, 8 tables, 4 orders of the backward, 2 sizes of blocks, mask_mod
    """

    query: Any
    key: Any
    value: Any
    score_mod: Any
    block_mask: tuple[Any, ...]
    scale: float
    options: dict[str, Any]
    score_buffers: tuple[Any, ...] = ()
    mask_buffers: tuple[Any, ...] = ()

    @property
    def mask_mod(self) -> Any:
        return self.block_mask[-1]


def is_flex(target: Any) -> bool:
    """Whether a call target is the higher-order operator flex_attention."""
    return isinstance(target, HigherOrderOperator) and target.name() == "flex_attention"


def flex_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The calls of flex_attention in one of Dynamo's graphs, in its order."""
    return [node for node in graph.nodes if node.op == "call_function" and is_flex(node.target)]


def calls_functorch(node: fx.Node) -> bool:
    """Whether a node enters or leaves a transform of torch.func, such as vmap."""
    return schema.is_functorch(node.target)


def example(node: Any) -> Any:
    """The value that Dynamo or torch.export has traced a node with; of what is no node, itself."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def refusal_of_flex(node: fx.Node) -> Refusal | None:
    """Why a call cannot be captured: only its output is supported, not the logsumexp or maximum of its softmax."""
    wanted = [user for user in node.users if user.target is not operator.getitem or (user.args[1] != 0 and user.users)]
    options = FlexArgs(*node.args).options
    if wanted or options.get("OUTPUT_LOGSUMEXP") or options.get("OUTPUT_MAX"):
        return Refusal("flex_attention returns more than its output (return_lse or return_aux)", node)
    return None


# ---- score_mod and mask_mod over all pairs ---------------------------------------------------------------------------
def over_pairs(mod: Callable[..., Any], scored: bool, buffers: int) -> Callable[..., Any]:
    """`mod` over b [B], h [H], q [Sq], k [Sk], and before them, where `scored`, a score [B, H, Sq, Sk]."""
    for place in reversed(range(4)):
        dims = [0 if at == place else None for at in range(4)]
        mod = torch.vmap(mod, in_dims=(*((0,) if scored else ()), *dims, *((None,) * buffers)))
    return lambda *args: indexed(mod, *args)


class IndexedByTensors(TransformGetItemToIndex):
    """In table[h, 0] with a tensor h inside vmap, h is an index, not a number, and 0 is another. Beside h, an index
    over which vmap does not run is made one: fake tensors cannot be indexed by both kinds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], all_batched(args[1]))
        return super().__torch_function__(func, types, args, kwargs)


def all_batched(places: tuple[Any, ...]) -> tuple[Any, ...]:
    """The indices of `table[places]`, if they are numbers and tensors of numbers, and vmap runs over any."""
    over = [x for x in places if isinstance(x, Tensor) and is_batchedtensor(x)]
    numbers = all(isinstance(x, (Tensor, int, torch.SymInt)) for x in places)
    if not over or not numbers or any(isinstance(x, bool) or _is_mask(x) for x in places):
        return places
    zero = torch.zeros_like(over[0], dtype=torch.int64)
    return tuple(x if isinstance(x, Tensor) and is_batchedtensor(x) else zero + x for x in places)


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool


def indexed(mod: Callable[..., Any], *args: Any) -> Any:
    """`mod(*args)`, in which tensors without dims are indices."""
    with IndexedByTensors():
        return mod(*args)


def traced(mod: Callable[..., Any], given: Sequence[Any]) -> fx.GraphModule:
    """The ATen graph of `mod(*given)`, fake tensors."""
    graph_module = make_fx(mod, tracing_mode="real", _allow_non_fake_inputs=True)(*given)
    for node in graph_module.graph.nodes:
        if node.target is TO_COPY and isinstance(node.args[0], (bool, int, float)):
            node.target, node.kwargs = aten.scalar_tensor.default, {"dtype": node.kwargs["dtype"]}
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def closed(value: Any) -> Any:
    """An open number that a mod computes with, fixed as the sizes beside it are: ATen takes it for no tensor."""
    return int(value) if isinstance(value, torch.SymInt) else value


def with_mods(gm: fx.GraphModule, fake: Callable[[Any], Any]) -> None:
    """Gives each call in a copy of Dynamo's graph mods that are ATen over all pairs. Under a fake mode; `fake` brings a
    value of Dynamo's into it."""
    for node in flex_nodes(gm.graph):
        call = FlexArgs(*node.args)
        query, key = fake(example(call.query)), fake(example(call.key))
        at = _score_indices(query, key)
        score = query.new_empty([len(place) for place in at], dtype=_accumulation_dtype(query.dtype))
        score_given = [closed(fake(example(buffer))) for buffer in call.score_buffers]
        mask_given = [closed(fake(example(buffer))) for buffer in call.mask_buffers]
        score_mod, mask_mod = getattr(gm, call.score_mod.target), getattr(gm, call.mask_mod.target)
        scores = traced(over_pairs(score_mod, True, len(score_given)), [score, *at, *score_given])
        visible = traced(over_pairs(mask_mod, False, len(mask_given)), [*at, *mask_given])
        mods = [_attach_subgraph(gm, node, "scores", scores), _attach_subgraph(gm, node, "visible", visible)]
        node.args = (*node.args[:3], mods[0], (*call.block_mask[:-1], mods[1]), *node.args[5:])


def _attach_subgraph(gm: fx.GraphModule, node: fx.Node, name: str, value: fx.GraphModule) -> fx.Node:
    name = f"{node.name}_{name}"
    setattr(gm, name, value)
    with gm.graph.inserting_before(node):
        return gm.graph.get_attr(name)


# ---- the definition --------------------------------------------------------------------------------------------------
def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _score_indices(query: Tensor, key: Tensor) -> list[Tensor]:
    sizes = (*query.shape[:3], key.shape[2])
    return [torch.arange(size, device=query.device) for size in sizes]


def written_out(*args: Any) -> tuple[Tensor, None, None]:
    """What the operator computes, its mods over all pairs, as torch defines it: autocast casts the operands only."""
    call = FlexArgs(*args)
    query, key, value = call.query, call.key, call.value
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (_cast(x, torch.get_autocast_dtype(device)) for x in (query, key, value))
    with torch.autocast(device, enabled=False):
        kind, groups = _accumulation_dtype(query.dtype), query.shape[1] // key.shape[1]
        key, value = (_cast(_expand_batch(x, query.shape[0]), query.dtype) for x in (key, value))
        every = key.repeat_interleave(groups, 1) if groups > 1 else key
        product = _cast(query, kind) @ _cast(every, kind).mT
        at = _score_indices(query, key)
        scores = _cast(call.score_mod(product * call.scale, *at, *call.score_buffers), kind)
        scores = torch.where(call.mask_mod(*at, *call.mask_buffers), scores, -math.inf)
        return operators.flex.default(query, key, value, product, scores), None, None


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _expand_batch(x: Tensor, batch: int) -> Tensor:
    return x if x.shape[0] == batch else x.expand(batch, -1, -1, -1)
