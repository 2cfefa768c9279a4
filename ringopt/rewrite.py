"""The form of a pass that puts one thing in the place of another, wherever it is found.

    for each subject:    found = match(subject)    ->    refusal = check(found)    ->    rewrite(found) | refuse(found)

`match` says what has the shape of the thing, `check` whether it may be rewritten, or else why not, in a sentence about
a node; `refuse` puts that where the report has it. A pass that is about a graph as a whole (an order, a propagation, a
plan) has not this form: it is a plain `Pass`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch.fx as fx

from ringopt.ir.constants import Constants
from ringopt.ir.nodes import requires_grad
from ringopt.ir.refusal import Refusal
from ringopt.pipeline import Context, Pass

S = TypeVar("S")  # a node, as a rule
M = TypeVar("M")
T = TypeVar("T")


class Facts:
    """What is known of the graph that a pass goes over. Each is found when it is first asked for, and stays as it was
    then."""

    def __init__(self, graph: fx.Graph, context: Context):
        self.graph, self.context = graph, context
        self._found: dict[Hashable, Any] = {}

    @cached_property
    def constants(self) -> Constants:
        """The values that no input reaches."""
        return Constants(self.graph, self.context.values, self.context.relied_on)

    @cached_property
    def carries(self) -> dict[fx.Node, bool]:
        """Which values carry a gradient."""
        return requires_grad(self.graph)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """What `find` gave when it was first asked for under `key`."""
        if key not in self._found:
            self._found[key] = find()
        found: T = self._found[key]
        return found


@dataclass(frozen=True)
class Rewrite(Pass, Generic[S, M]):
    """A pass that matches, checks and rewrites, one subject after the other."""

    @abstractmethod
    def subjects(self, facts: Facts) -> Iterable[S]:
        """What may match, in the order in which it is rewritten."""

    @abstractmethod
    def match(self, subject: S, facts: Facts) -> M | None:
        """The parts of the thing; None for what is another. It sees the graph as those before it have left it."""

    @abstractmethod
    def check(self, found: M, facts: Facts) -> Refusal | None:
        """Why it may not be rewritten; None where it may."""

    @abstractmethod
    def rewrite(self, found: M, facts: Facts) -> None:
        """Edits the graph. What is new is told to come from where the old was (ringopt/ir/nodes.py, `emit`)."""

    @abstractmethod
    def refuse(self, found: M, refusal: Refusal, facts: Facts) -> None:
        """Has the report say so."""

    def finish(self, facts: Facts) -> None:
        """What is to be done when all are."""

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        facts = Facts(gm.graph, context)
        for subject in list(self.subjects(facts)):
            found = self.match(subject, facts)
            if found is None:
                continue
            refusal = self.check(found, facts)
            if refusal is None:
                self.rewrite(found, facts)
            else:
                self.refuse(found, refusal, facts)
        self.finish(facts)
