"""What becomes of a graph, by value: `Compiled`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from ringopt.frontend.capture import Captured
from ringopt.frontend.dtensors.local_graph import DTensorBoundary
from ringopt.frontend.flex_block_masks import Claim
from ringopt.ir.canonical_order import Program
from ringopt.ir.io_order import Order
from ringopt.ir.nodes import is_parameter, value_of
from ringopt.ir.notes import OF_PROGRAM
from ringopt.ir.placement import Sharded, Spread
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import SymbolPlaces, formula, plain
from ringopt.overlap.async_collectives import Budget
from ringopt.pipeline import Context
from ringopt.report import Report
from ringopt.reporting.figures import MatrixWork
from ringopt.runtime.graph_boundary import examples
from ringopt.runtime.verify_nodes import Counterparts


@dataclass(frozen=True)
class Compiled:
    """What becomes of a graph. Inputs and outputs are numbered by position.

    graph         to be compiled in its place; None where the graph itself is best, and all but the report is empty
    report        what was done and why
    drawn         what is drawn by position, by the names of canonicalize, in the order of its seeds
    draws_random  what draws random numbers that must be the same on every rank
    program       the text that the ranks compare
    order         the canonical one of inputs and outputs, which a partitioner and autograd follow
    given         inputs of which it takes this rank's rows
    left          outputs that are to be lazy, their sizes as formulas of symbols
    symbols       where a call has these
    gathered      outputs that are whole, and the rows that they are gathered from
    local         outputs that are this rank's rows
    batch         inputs that are no parameters, buffers or attributes of the model
    relied_on     inputs whose numbers were read
    claims        what was taken for granted of block tables among the inputs
    averaged      inputs of whose gradients the mean is left to a wrapper
    weights       by name, what is made of pairs of rows and is no site, and the dims that count them
    budget        what may be started early
    sites         by name, the attentions, those that were refused too
    pairs         which node is which of the program, where each is to be verified
    around        what stands around it where the program has DTensors
    work          its matrix work; None of a graph that was refused
    """

    graph: fx.GraphModule | None
    report: Report
    drawn: Sequence[str] = ()
    draws_random: Sequence[str] = ()
    program: Program | None = None
    order: Order | None = None
    given: Mapping[int, Spread] = field(default_factory=dict)
    left: Mapping[int, Spread] = field(default_factory=dict)
    symbols: SymbolPlaces = field(default_factory=SymbolPlaces)
    gathered: Mapping[int, Sharded] = field(default_factory=dict)
    local: Mapping[int, Spread] = field(default_factory=dict)
    batch: Sequence[int] = ()
    relied_on: Sequence[int] = ()
    claims: Sequence[Claim] = ()
    averaged: Sequence[int] = ()
    weights: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    sites: Mapping[str, SiteInfo] = field(default_factory=dict)
    pairs: Counterparts | None = None
    around: DTensorBoundary = field(default_factory=DTensorBoundary)
    work: MatrixWork | None = None

    def examples(self, inputs: Sequence[Any]) -> list[Any]:
        """What the graph is compiled for, where Dynamo's has these inputs."""
        return examples(self.around.entering(inputs), self.given)

    @classmethod
    def of(cls, made: Captured, report: Report, context: Context) -> Compiled:
        """Of a graph behind all passes."""
        options, inputs = context.options, list(enumerate(context.inputs))
        symbols = SymbolPlaces.of([value_of(node) for node in context.inputs])
        return cls(
            made.graph,
            report,
            drawn=context.drawn,
            draws_random=context.replicated_random,
            program=context.program,
            order=context.canonical,
            given={i: context.given[node] for i, node in inputs if node in context.given},
            left={i: in_symbols(how, symbols) for i, how in context.left.items()} if options.outputs == "lazy" else {},
            symbols=symbols,
            gathered=context.gathered,
            local=context.left if options.outputs == "local" else {},
            batch=[i for i, node in inputs if not (is_parameter(node) or node.meta.get(OF_PROGRAM))],
            relied_on=[i for i, node in inputs if node in context.relied_on],
            claims=made.claims,
            averaged=[] if options.sync_gradients else [i for i, node in inputs if is_parameter(node)],
            weights=context.weights,
            budget=context.budget or Budget(),
            sites={node.name: info for node, info in context.sites.items()},
            around=made.around,
        )


def in_symbols(how: Spread, symbols: SymbolPlaces) -> Spread:
    """With formulas that a call can work out; where it cannot, of the sizes at hand, so that others compile anew."""
    known = how.with_sizes(lambda size: formula(plain(size)))
    return known if all(map(symbols.cover, known.sizes)) else how.with_sizes(int)
