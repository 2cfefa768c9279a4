"""Recurrences that operators of other libraries compute: how ranks share each (kernel_scans.py places them)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.cost.recurrence import ScanCase, kernel_work
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.ir.nodes import arguments_of, shape_of, value_of
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand, is_open
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traits import sent_bytes
from ringopt.options import Strategy
from ringopt.rules.declare import ScanRule, declaration_of, is_foreign
from ringopt.scans.kernel import ScanKernel, contradiction, frame_of, state_of
from ringopt.scans.trace import OperandKind
from ringopt.sharding.recurrences.ways import choose_way, heads_bytes, in_common
from ringopt.torch_compat.schema import schema_of

CONVERTED = "a program for any number of ranks has no recurrence of another library's operator on shards yet"


def declared_scans(graph: fx.Graph) -> list[fx.Node]:
    """Calls of operators whose rule says that they are a recurrence."""
    return [node for node in graph.nodes if is_foreign(node) and isinstance(declaration_of(node), ScanRule)]


def tokens_of(node: fx.Node) -> tuple[list[fx.Node], Sharded]:
    """The operands with tokens, and how those are spread."""
    says, given = declaration_of(node), arguments_of(node)
    assert isinstance(says, ScanRule)
    xs = [given[name] for name in says.tokens if isinstance(given[name], fx.Node)]
    return xs, Sharded(says.dim, 1, shape_of(xs[0])[says.dim], 1)


def kernel_site(node: fx.Node, mesh: Mesh, layouts: Layouts, strategy: Strategy, learns: bool) -> SiteInfo:
    """What is known of one before it is placed: what the ranks exchange for it, or why all compute all of it."""
    says = declaration_of(node)
    assert isinstance(says, ScanRule)
    name, wrong = schema_of(node.target).name, contradiction(node, says)
    info = SiteInfo.at(node, "scan", name, False)
    if wrong or mesh.name == ANY:
        info.refusal = f"{name}: {wrong or CONVERTED}"
        return info
    _xs, rows = tokens_of(node)
    info.pattern, info.training = f"{at_hand(rows.length)} tokens", learns
    if not rows.length >= chunks_per_rank(layouts.of(rows.length)) * mesh.size:
        info.refusal = f"{at_hand(rows.length)} tokens for {mesh.size} ranks: every rank needs one in each segment"
        return info
    info.layout, info.kernel = layouts.of(rows.length), name
    if ScanKernel.of(node, says).segments is not None:
        info.notes.append("it packs sequences: no state goes over from one to the next")
    why = why_not_heads(node, says, mesh, layouts)
    if says.axes is None and not why:
        alone_by_heads(node, says, info, mesh)
        return info
    by_states(node, says, info, mesh)
    if strategy not in ("auto", "ulysses"):
        return info
    if why:
        info.notes.append(f"its heads are not shared: {why}")
    else:
        compared(node, says, info, mesh, strategy)
    return info


def by_states(node: fx.Node, says: ScanRule, info: SiteInfo, mesh: Mesh) -> None:
    """Each rank its tokens."""
    _xs, rows = tokens_of(node)
    kernel, state, segments = ScanKernel.of(node, says), state_of(node, says), chunks_per_rank(info.layout) * mesh.size
    sized = SizedCall.of(node, mesh.size, mesh.rank, number=at_hand)
    there = {"steps": rows.length, "layout": info.layout, "state": state, "kernel": kernel.text, "segments": segments}
    info.bytes_sent = sent_bytes(sized.conjugate("sharded_kernel_scan", sized.value, **there))
    carried, info.strategy = f"a state of {list(state.shape)}", "states"
    if says.axes is None:
        info.strategy = "in turn"
        info.notes.append(f"{carried} of {info.kernel} is not affine by its rule: the ranks run one after the other")
    else:
        axes = ", ".join(says.axes)
        info.notes.append(f"{carried} ({axes}) of {info.kernel} is affine by its rule; its maps do not grow with n")


def why_not_heads(node: fx.Node, says: ScanRule, mesh: Mesh, layouts: Layouts) -> str:
    """Why not every rank can have as many heads as another, the same ones of all operands; "" where each can. One head
    of what has tokens is for all."""
    if any(str(at) not in says.heads for at in range(len(value_of(node)))):
        return "its rule does not say where all results have them"
    if is_open(tokens_of(node)[1].length):
        return "the length is dynamic"
    heads = list(heads_of(node, says))
    if any(is_open(size) for _name, size in heads):
        return "how many there are is dynamic"
    total = next(size for name, size in heads if name == "0")
    sizes = {size for name, size in heads if size > 1 or name not in says.tokens}
    names = {layouts.of(size) for size in sizes}
    parts = max(map(chunks_per_rank, names)) * mesh.size
    if len(names) > 1 or any(size % parts or (total % size and size % total) for size in sizes):
        return f"{', '.join(f'{name} {size}' for name, size in heads)} do not part alike into {parts}"
    return ""


def heads_of(node: fx.Node, says: ScanRule) -> Iterator[tuple[str, Any]]:
    """Of each operand that has heads, and of each result: how many."""
    given = arguments_of(node)
    for name, dim in says.heads.items():
        x = value_of(node)[int(name)] if name.isdigit() else value_of(given[name])
        if x is not None:
            yield name, x.shape[dim]


def is_common(node: fx.Node, x: fx.Node, says: ScanRule) -> bool:
    """Whether an operand has one head for all, or none."""
    name = next(name for name, given in arguments_of(node).items() if given is x)
    return name not in says.heads or at_hand(shape_of(x)[says.heads[name]]) == 1


def compared(node: fx.Node, says: ScanRule, info: SiteInfo, mesh: Mesh, strategy: Strategy) -> None:
    """By heads where that is predicted to be faster, or was asked for."""
    xs, rows = tokens_of(node)
    state = state_of(node, says)
    frame = frame_of(says.axes or (), OperandKind.of(state))
    work = kernel_work(at_hand(state.numel()), at_hand(rows.length))
    case = ScanCase(work, work, info.bytes_sent, moved(node, says, mesh), frame.runs, mesh.size, info.training)
    choose_way(info, case, mesh, value_of(xs[0]), strategy)
    common = [x for x in xs if is_common(node, x, says)]
    if info.strategy == "heads" and common:
        info.notes.append(in_common(common))


def moved(node: fx.Node, says: ScanRule, mesh: Mesh) -> int:
    """Bytes of all that has tokens, of one rank's tokens; what is in common goes to every rank."""
    xs, _rows = tokens_of(node)
    outputs = [x for at, x in enumerate(value_of(node)) if at != says.last]
    common = [value_of(x) for x in xs if is_common(node, x, says) for _ in range(mesh.size - 1)]
    return sum(at_hand(x.numel()) * int(x.element_size()) for x in (*map(value_of, xs), *outputs, *common)) // mesh.size


def alone_by_heads(node: fx.Node, says: ScanRule, info: SiteInfo, mesh: Mesh) -> None:
    """By heads without comparing, for the ranks would run their tokens one after the other."""
    info.strategy = "heads"
    info.bytes_sent = heads_bytes(moved(node, says, mesh), mesh.size)
    of_each = next(size for name, size in heads_of(node, says) if name == "0") // mesh.size
    info.notes.append(f"shared by heads, {of_each} a rank: what {info.kernel} carries is not affine by its rule")
