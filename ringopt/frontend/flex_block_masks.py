"""The block tables of flex_attention: they must say what mask_mod says.

A BlockMask names, for each block of queries, the blocks of keys that mask_mod is asked about, and those that are seen
whole. create_block_mask makes these tables from mask_mod; a program may also write its own, and hide by them what
mask_mod does not hide. The numbers themselves decide: `Claim.holds` asks mask_mod about every block that the tables
leave out or call whole, 128 rows at a time, which costs what create_block_mask costs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from ringopt.frontend.flex import FlexArgs, calls_functorch, example, flex_nodes, over_pairs
from ringopt.ir.refusal import Refusal
from ringopt.torch_compat.fake_tensors import FakeTensor, unset_fake_temporarily

ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
IN_PLACE = (operator.setitem, *(getattr(operator, f"i{name}") for name in ARITHMETIC))
IN_PLACE_METHODS = ("__setitem__", *(f"__i{name}__" for name in ARITHMETIC))

NESTING = ("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting")

ROWS = 128  # mask_mod is asked about so many queries at a time


@dataclass(frozen=True)
class Claim:
    """Of one call. `made` computes its tables and the buffers of mask_mod from the inputs of the graph; `places` are
    those of the tensors that it reads, `sizes` those of b, h, q, k, `block` the queries and keys of a block."""

    made: fx.GraphModule
    places: tuple[int, ...]
    mask_mod: Callable[..., Any]
    sizes: tuple[int, int, int, int]
    block: tuple[int, int]

    def readable(self, inputs: Sequence[Any]) -> bool:
        """Whether there are numbers to read: a dry run has none."""
        return not any(is_hollow(inputs[i]) for i in self.places)

    def holds(self, inputs: Sequence[Any]) -> bool:
        with unset_fake_temporarily(), torch.no_grad():
            tables, buffers = self.made(*(int(x) if isinstance(x, torch.SymInt) else x for x in inputs))
            rows, keys = (-(-length // size) for length, size in zip(self.sizes[2:], self.block, strict=True))
            blocks = seen_blocks(tables, rows, keys)
            mask = over_pairs(self.mask_mod, False, len(buffers))
            return blocks is not None and agree(*blocks, lambda *at: mask(*at, *buffers), self.sizes, self.block)


def is_hollow(value: Any) -> bool:
    """Whether a tensor has no numbers."""
    return isinstance(value, FakeTensor) or value.device.type == "meta"


def claims(gm: fx.GraphModule) -> list[Claim] | Refusal:
    """Of Dynamo's `gm`, one for each call of flex_attention."""
    found = []
    for node in flex_nodes(gm.graph):
        call = FlexArgs(*node.args)
        computed = [each for each in (*tables(call), *call.mask_buffers) if isinstance(each, fx.Node)]
        refusal = check([each for each in computed if each.op != "placeholder"], node)
        if refusal is not None:
            return refusal
        made = part(gm, [tables(call), list(call.mask_buffers)])
        inputs = enumerate(made.graph.find_nodes(op="placeholder"))
        places = tuple(i for i, each in inputs if each.users and isinstance(example(each), Tensor))
        batch, heads, queries = map(int, example(call.query).shape[:3])
        keys = int(example(call.key).shape[2])
        rows, columns = (int(example(size)) for size in call.block_mask[-3:-1])
        mask_mod = getattr(gm, call.mask_mod.target)
        block = min(rows, queries), min(columns, keys)
        found.append(Claim(made, places, mask_mod, (batch, heads, queries, keys), block))
    return found


def check(computed: Sequence[fx.Node], node: fx.Node) -> Refusal | None:
    """Whether what the graph computes of a block mask can be computed beside it, at every call that changes it."""
    above = ancestors(computed)
    if any(each.op == "placeholder" and _is_learned(each) for each in above):
        why = "from parameters, or from what carries a gradient"
    elif any(_writes(each) and not is_fill(each) for each in above):
        why = "by writes into tensors"
    elif any(_draws(each) and not _writes(each) for each in above):
        why = "from random numbers"
    else:
        return None
    return Refusal(f"the block mask of flex_attention is computed {why}, inside the compiled region", node)


def tables(call: FlexArgs) -> list[Any]:
    """Number and indices of: partial blocks of keys, full ones, partial blocks of queries, full ones; None where there
    are none."""
    return list(call.block_mask[2:10])


def _is_learned(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, Tensor) and (value.requires_grad or "_parameters_" in node.name)


# ---- the part of a graph that makes them -----------------------------------------------------------------------------
def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes`, all they are made of, and what is written into that on the way."""
    found, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
            stack.extend(user for user in node.users if _writes(user) and user.args[:1] == (node,))
    return found


def part(gm: fx.GraphModule, outputs: list[list[Any]]) -> fx.GraphModule:
    """`gm` with other outputs, and nothing in it that they do not need."""
    kept = ancestors(node for each in outputs for node in each if isinstance(node, fx.Node))
    if any(calls_functorch(node) for node in kept):
        kept |= ancestors(filter(is_nesting, gm.graph.nodes))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in kept:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(outputs, copies.__getitem__))
    return fx.GraphModule(gm, graph)


def erase_tables(graph: fx.Graph) -> None:
    """Takes out of a copy of Dynamo's graph what only made block tables."""
    calls = flex_nodes(graph)
    making = ancestors(each for node in calls for each in FlexArgs(*node.args).block_mask if isinstance(each, fx.Node))
    for node in calls:
        mask = FlexArgs(*node.args).block_mask
        node.args = (*node.args[:4], mask[-1:], *node.args[5:])
    batched = set[fx.Node]()  # what vmap makes may also go nowhere
    for node in graph.nodes:
        if calls_functorch(node) or not batched.isdisjoint(node.all_input_nodes):
            batched.add(node)
    for node in reversed(graph.nodes):
        if node in making | batched and not is_nesting(node) and is_unused(node):
            graph.erase_node(node)
    if not any(calls_functorch(node) and not is_nesting(node) for node in graph.nodes):
        for node in list(filter(is_nesting, graph.nodes)):
            graph.erase_node(node)


def is_nesting(node: fx.Node) -> bool:
    """Whether the call begins or ends a vmap; it has no result."""
    return calls_functorch(node) and getattr(node.target, "__name__", "") in NESTING


def is_unused(node: fx.Node) -> bool:
    """Nothing reads the node or what it writes; and it writes nowhere else, draws nothing."""
    if is_fill(node):
        return _serves_only(node.args[0], node)
    return node.op != "placeholder" and not node.users and not _writes(node) and not _draws(node)


def is_fill(node: fx.Node) -> bool:
    """How torch makes a table: ones are written into new zeros."""
    base = node.args[0] if node.target is operator.setitem else None
    return isinstance(base, fx.Node) and base.target == "new_zeros"


def _writes(node: fx.Node) -> bool:
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
        return node.target in IN_PLACE
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name in IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))


def _draws(node: fx.Node) -> bool:
    return node.op != "placeholder" and (node.is_impure() or "dropout" in str(node.target))


def _serves_only(node: fx.Node, end: fx.Node) -> bool:
    return all(user is end or _serves_only(user, end) for user in node.users)


# ---- what they say ---------------------------------------------------------------------------------------------------
def seen_blocks(tables: Sequence[Tensor | None], rows: int, keys: int) -> tuple[Tensor, Tensor] | None:
    """Partial and full blocks, bool [1|B, 1|H, rows, keys]; None where the tables contradict themselves."""
    sizes = (keys, keys, rows, rows)
    found = [dense(tables[2 * i], tables[2 * i + 1], size) for i, size in enumerate(sizes)]
    partial, full, back, full_back = found
    if partial is None or partial.shape[2] != rows or (full is not None and bool((partial & full).any())):
        return None
    for ahead, behind in ((partial, back), (full, full_back)):
        if behind is not None and (ahead is None or not torch.equal(ahead, behind.mT)):
            return None
    return partial, torch.zeros_like(partial) if full is None else full


def dense(number: Tensor | None, index: Tensor | None, size: int) -> Tensor | None:
    """bool [B, H, rows, size]: the first `number` [B, H, rows] entries of each row of `index`."""
    if number is None or index is None:
        return None
    given = torch.arange(index.shape[-1], device=index.device) < number[..., None]
    places = torch.where(given, index, size).long().clamp(0, size)  # one more column takes what is not given
    found = torch.zeros((*number.shape, size + 1), dtype=torch.bool, device=index.device)
    return found.scatter_(-1, places, True)[..., :size]


def agree(
    partial: Tensor,
    full: Tensor,
    mask: Callable[..., Tensor],
    sizes: tuple[int, int, int, int],
    block: tuple[int, int],
) -> bool:
    """Whether `mask` hides all of every block that is not listed, and nothing of every full one."""
    batch, heads, queries, keys = (torch.arange(size, device=partial.device) for size in sizes)
    hidden, missing = ~(partial | full), -len(keys) % block[1]
    for start in range(0, sizes[2], min(ROWS, block[0])):
        row = start // block[0]
        if not bool((hidden | full)[:, :, row].any()):
            continue
        seen = mask(batch, heads, queries[start : min(start + ROWS, (row + 1) * block[0])], keys)
        some = F.pad(seen, (0, missing), value=False).unflatten(-1, (-1, block[1])).any(-1).any(-2)
        every = F.pad(seen, (0, missing), value=True).unflatten(-1, (-1, block[1])).all(-1).all(-2)
        if bool((some & hidden[:, :, row]).any()) or bool((~every & full[:, :, row]).any()):
            return False
    return True
