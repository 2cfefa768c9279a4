"""Two programs run on the same inputs, and how far the values of matched nodes are apart, and their gradients.

Both are run node by node, beside each other: a value is held until its readers and its counterpart have been there, so
two programs of one order hold little more than each of them does. Nodes inside nested graphs are not compared, but
the nodes that call those are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch import Tensor
from torch.export import ExportedProgram

from ringopt.compare.align import PARTED
from ringopt.compare.graph_diff import Change, GraphDiff, with_errors
from ringopt.compare.node_gradients import gradient_errors_of, with_same_readers
from ringopt.compare.node_values import NodeError, SteppedGraph, error_of
from ringopt.compare.program_inputs import Given, Inputs, what_is_given
from ringopt.errors import ProgramError, first_line

Runnable: TypeAlias = ExportedProgram | fx.GraphModule


def with_run(diff: GraphDiff, before: Runnable, after: Runnable, given: Given, gradients: bool = True) -> GraphDiff:
    """The diff with how far values and `gradients` are apart. Raises ProgramError where a program does not run on these
    inputs."""
    pairs = {
        change.after.name: change.before.name
        for change in diff.changes
        if change.before is not None and change.after is not None and runs_by_itself(change)
    }
    sides = Inputs(before), Inputs(after)
    values = inputs_of(sides[0], sides[1], what_is_given(given), pairs)
    with torch.no_grad():
        runs = [
            named_values(which, program, side.in_order(value))
            for which, program, side, value in zip(("before", "after"), (before, after), sides, values, strict=True)
        ]
        parted = {view.name for change in diff.changes if (view := change.after) is not None and view.op in PARTED}
        errors = dict(compared(Behind(runs[0], kept=set(pairs.values())), runs[1], pairs, parted))
    if not gradients:
        return with_errors(diff, errors)
    try:
        return with_errors(diff, errors, gradient_errors_of(sides, values, with_same_readers(diff, pairs)))
    except ProgramError as why:
        return replace(with_errors(diff, errors), no_gradients=str(why))


def runs_by_itself(change: Change) -> bool:
    """Not the output, and nothing inside a nested graph."""
    return change.node.op != "output" and not any("/" in view.name for view in (change.before, change.after) if view)


def inputs_of(
    before: Inputs, after: Inputs, given: Any, pairs: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of both programs, by name. Those that are made at random are the same for inputs that are each other's
    counterparts."""
    if not isinstance(given, int):
        return before.bound(given), after.bound(given)
    one, other = before.made(given), after.made(given)
    for name, value in other.items():
        known = one.get(pairs.get(name, ""))
        if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape == value.shape:
            other[name] = known.to(value.dtype)
    return one, other


def named_values(which: str, program: Runnable, inputs: list[Any]) -> Iterator[tuple[str, Any, bool]]:
    """Every node with its value, and whether that may be written later. Raises ProgramError for what a node raises."""
    gm = program if isinstance(program, fx.GraphModule) else program.graph_module
    steps = SteppedGraph(gm)
    values = steps.values(inputs)
    nodes = iter(gm.graph.nodes)
    while True:
        node = next(nodes, None)
        try:
            found = next(values, None)
        except Exception as error:  # whatever its operators raise
            name = node.name if node is not None else "its inputs"
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ProgramError(f"the program {which} does not run on these inputs: %{name}: {why}") from error
        if found is None:
            return
        yield found[0].name, found[1], steps.writes


@dataclass
class Behind:
    """A program that runs as far as it is asked for. Of what it passes, the values of `kept` wait to be taken."""

    run: Iterator[tuple[str, Any, bool]]
    kept: set[str]
    waiting: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str) -> Any:
        """The value of a node, once."""
        while name not in self.waiting:
            passed, value, written = next(self.run)
            if passed in self.kept:
                self.waiting[passed] = kept(value) if written and passed != name else value
        return self.waiting.pop(name)


def kept(value: Any) -> Any:
    """As it is now, whatever is written later."""
    if isinstance(value, (tuple, list)):
        return [kept(part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value


def compared(
    before: Behind, after: Iterable[tuple[str, Any, bool]], pairs: Mapping[str, str], parted: set[str]
) -> Iterator[tuple[str, NodeError]]:
    """The errors of the nodes after, as they are computed. `parted`: whose first result is the value."""
    for name, found, _written in after:
        if name not in pairs:
            continue
        expected = before.take(pairs[name])
        if name in parted and isinstance(expected, Tensor):
            found = found[0]
        error = error_of(found, expected)
        if error is not None:
            yield name, error
