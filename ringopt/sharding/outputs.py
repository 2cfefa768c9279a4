"""What a sharded graph returns (whole values, or the rows of each rank), and what it gathered on the way."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch.fx as fx

from ringopt.ir.memory import base_of, shared_outputs
from ringopt.ir.nodes import module_path, op_name, source_line, value_of
from ringopt.ir.notes import STRIDES
from ringopt.ir.placement import Sharded, Spread
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.options import Outputs
from ringopt.report import Gather
from ringopt.rules.declare import declaration_of, is_foreign, line_to_write
from ringopt.sharding.sharder import Sharder


def leave(
    sharder: Sharder, node: fx.Node, form: Outputs, given: Collection[fx.Node], places: Sequence[int] | None
) -> dict[int, Spread]:
    """The outputs `node`: whole, or left on their ranks where `form` says so; how those are spread. `given` are inputs
    of which a rank has its rows only, `places` those of the outputs for the caller, where
    they have others."""
    sharder.reader = node
    left: dict[int, Spread] = {}
    outputs = list(node.args[0]) if isinstance(node.args[0], (tuple, list)) else []
    bases = bases_of(node, form, given)

    def whole(out: fx.Node) -> fx.Node:
        return sharder.as_view(out, bases[out]) if out in bases else sharder.replicated(out)

    if form == "gather" or not outputs:
        sharder.graph.output(fx.map_arg(node.args[0], whole)).meta.update(node.meta)
        return left
    for i, out in enumerate(outputs):
        placement = sharder.placements.get(out) if isinstance(out, fx.Node) else None
        if placement is not None and out not in bases:
            value, where = value_of(out), module_path(out) or source_line(out)
            name = f"output {places[i] if places is not None else i} ({out.name}{', ' + where if where else ''})"
            size, stride = tuple(value.shape), tuple(node.meta[STRIDES][i])
            how = Spread(placement, sharder.ranks.layout(placement.length), sharder.ranks.group, size, stride, name)
            # Rows that are given away are of the length at hand: what is open is fixed.
            left[i] = how.with_sizes(int) if form == "local" else how
            outputs[i] = sharder.values[out]
        else:
            outputs[i] = fx.map_arg(out, whole)
    sharder.graph.output(tuple(outputs)).meta.update(node.meta)
    return left


def gathered_outputs(sharder: Sharder, node: fx.Node, left: Collection[int]) -> dict[int, Sharded]:
    """Of the outputs `node`, by place, the rows that they are gathered from; not those `left` on their ranks."""
    outputs = node.args[0] if isinstance(node.args[0], (tuple, list)) else ()
    known = enumerate(sharder.placements.get(out) if isinstance(out, fx.Node) else None for out in outputs)
    return {place: at for place, at in known if at is not None and place not in left}


def bases_of(node: fx.Node, form: Outputs, given: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The outputs that are made again as views, and of what: of an input, or of what several of them lie in; not where
    the rows of that are all that a rank has or is to have. Raises GraphRefused."""
    found: dict[fx.Node, fx.Node] = {}
    for memory, outputs in shared_outputs(node.graph):
        base = base_of(memory, outputs)
        if isinstance(base, Refusal):
            raise GraphRefused(base)
        if base not in given and (memory[0] == "input" or form != "local"):
            found |= dict.fromkeys(outputs, base)
    return found


def gathers_of(sharder: Sharder) -> list[Gather]:
    """For the report. A gather whose result was dead code costs nothing and is not told."""
    alive, found = set(sharder.graph.nodes), []
    for note in sharder.gathers:
        if sharder.converted[note.value, "whole"] in alive:
            op = "output" if note.reader.op == "output" else op_name(note.reader)
            line = source_line(note.reader) or source_line(note.value)
            found.append(Gather(op, sharder.describe(note), note.bytes, module_path(note.reader), line))
    return found


def unknown_operators(sharder: Sharder, graph: fx.Graph) -> list[str]:
    """For the report: operators of other libraries that have no rule, of whose results a rank needs its rows only, and
    which every rank computes whole for them. (Those that sharded values are gathered for are told with that.)"""
    cut = {node: form.dim for node, form in sharder.converted if isinstance(form, Sharded)}
    named = {note.reader for note in sharder.gathers}
    found = dict[str, str]()
    for node in graph.nodes:
        if not is_foreign(node) or node in named or declaration_of(node) is not None:
            continue
        results = [node, *(user for user in node.users if user.target is operator.getitem)]
        dim = next((cut[each] for each in results if each in cut), None)
        if dim is not None:
            where = f" ({line})" if (line := module_path(node) or source_line(node)) else ""
            found[op_name(node)] = (
                f"{op_name(node)} has no rule, so every rank computes it whole, and all that it reads{where}. If it "
                f"works token by token, {line_to_write(node, dim)} keeps it on shards"
            )
    return list(found.values())
