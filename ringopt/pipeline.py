"""The line of passes: a tuple of passes, run in order, with one callback between them.

A pass edits the graph and fills the context; it never prints, recompiles or logs. All of that happens here, once.
"""

from __future__ import annotations

import difflib
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
import torch.fx as fx

from ringopt.distributed.mesh import Mesh
from ringopt.ir.canonical_order import Program
from ringopt.ir.checkpoint_regions import Regions
from ringopt.ir.io_order import Order
from ringopt.ir.nodes import eliminate_dead_code
from ringopt.ir.placement import Layouts, Sharded, Spread
from ringopt.ir.printer import short
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import SiteInfo
from ringopt.options import Options
from ringopt.output.printable import logger
from ringopt.overlap.async_collectives import Budget
from ringopt.recognize.row_pairs import Pairs
from ringopt.report import Gather
from ringopt.torch_compat.autograd import no_autocast
from ringopt.torch_compat.tracing import trace_structured

log = logger(__name__)


@dataclass
class Context:
    """What the passes of one graph share.

    inputs             of the graph, in the order of the caller
    values             tensors known when the graph is compiled (constants and buffers of the program), by node
    relied_on          of these, the ones whose numbers the transformed graph takes for granted
    sites              the attention nodes, in order
    scans              the recurrences that are one node, from the choice of strategies on
    drawn              random ops that are drawn by position, by name, in the order of their seeds
    replicated_random  ops that every rank must draw the same random numbers for
    carries            which values carry a gradient, from the choice of strategies on
    notes              what else the report says of the graph
    layouts            of each sequence, which rows a rank holds
    pairs              of tokens that are no site, by the product of queries and keys
    weights            by name, what is made of pairs of its rows, and the dims that count them
    given              inputs of which this rank has its rows, and how they are spread
    cuts               inputs that are whole and that an earlier graph had in rows, and how they may be cut again
    mixed              what operators read that mix a sequence, where a graph has nothing else to shard, and its rows
    left               outputs that stay on their ranks, by place, and how they are spread
    gathered           outputs that are whole, by place, and the rows that they are gathered from
    step               the pass that runs, or ran last
    improved           whether one process compiles this graph instead of the program's, though it calls no operator
    spreads            whether something is to be spread, once strategies are chosen
    order              while the passes run, the order of inputs and outputs that is not the caller's
    canonical          that order, afterwards: compilers below get the graph in it again
    program            the text that the ranks compare
    regions            that are checkpointed
    budget             what may be started early; None where there is no attention
    """

    options: Options
    mesh: Mesh
    inputs: list[fx.Node] = field(default_factory=list)
    values: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    relied_on: set[fx.Node] = field(default_factory=set)
    sites: dict[fx.Node, SiteInfo] = field(default_factory=dict)
    scans: dict[fx.Node, SiteInfo] = field(default_factory=dict)
    left_alone: list[Refusal] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    replicated_random: list[str] = field(default_factory=list)
    carries: dict[fx.Node, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    layouts: Layouts = field(default_factory=Layouts)
    pairs: dict[fx.Node, Pairs] = field(default_factory=dict)
    weights: dict[str, tuple[int, int]] = field(default_factory=dict)
    given: dict[fx.Node, Spread] = field(default_factory=dict)
    cuts: dict[fx.Node, Sharded] = field(default_factory=dict)
    mixed: dict[fx.Node, Sharded] = field(default_factory=dict)
    left: dict[int, Spread] = field(default_factory=dict)
    gathered: dict[int, Sharded] = field(default_factory=dict)
    step: str = "capture"
    improved: bool = False
    spreads: bool | None = None
    order: Order | None = None
    canonical: Order | None = None
    program: Program | None = None
    regions: Regions = field(default_factory=Regions)
    budget: Budget | None = None

    @property
    def shards(self) -> bool:
        """Whether something of the graph is to be spread over the ranks."""
        return self.mixes_rows or bool(self.cuts or self.mixed)

    @property
    def mixes_rows(self) -> bool:
        """Whether something in the graph is shared among ranks that hold rows, or rows come into it."""
        found = (*self.sites.values(), *self.scans.values())
        return bool(self.given or self.pairs) or any(info.refusal is None for info in found)

    def sort_sites(self, graph: fx.Graph) -> None:
        """Puts sites into the order of the program."""
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node, info in sorted(self.sites.items(), key=lambda site: place[site[0]]):
            del self.sites[node]
            self.sites[node] = info

    def forget(self, graph: fx.Graph) -> None:
        """Sites that nobody read, which `graph` has no longer."""
        alive = set(graph.nodes)
        for node in [node for node in self.sites if node.graph is graph and node not in alive]:
            del self.sites[node]


P = TypeVar("P", bound="Pass")


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite. Its fields are options of the same name. The graph is valid before and after.

    reads, writes   of the fields of Context, those that it may look at, and those that it may change (and look at)
    optional        whether it may be switched off: the numbers stay right, and `lost` says what then is not done
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[bool] = False
    lost: ClassVar[str] = ""

    def with_options(self: P, options: Options) -> P:
        asked = {each.name: getattr(options, each.name) for each in fields(self)}
        return replace(self, **asked) if asked else self

    @abstractmethod
    def run(self, gm: fx.GraphModule, context: Context) -> None:
        """Edits `gm.graph` in place."""


class ContractError(Exception):
    """A pass looked at a field of the context, or changed one, that it does not declare."""


class View:
    """The context as one pass may have it."""

    def __init__(self, context: Context, step: Pass):
        self.__dict__.update(_context=context, _step=step)

    def __getattr__(self, name: str) -> Any:
        context, step = self._context, self._step
        if name not in FIELDS:  # what the context makes of its fields, by way of this view
            return getattr(Context, name).__get__(self, Context)
        if name in step.writes:
            return getattr(context, name)
        if name not in step.reads:
            raise ContractError(f"pass {step.name} looks at context.{name}, which it does not declare to read")
        value = getattr(context, name)
        return ReadOnly(value, step.name, name) if isinstance(value, (dict, list, set)) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._step.writes:
            raise ContractError(f"pass {self._step.name} sets context.{name}, which it does not declare to write")
        setattr(self._context, name, value)


class ReadOnly(Mapping[Any, Any]):
    """A dict, list or set of the context, for a pass that does not declare to write it."""

    def __init__(self, held: Any, step: str, name: str):
        self._held, self._step, self._name = held, step, name

    def __getitem__(self, key: Any) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def _refuse(self, *_given: Any) -> NoReturn:
        raise ContractError(f"pass {self._step} changes context.{self._name}, which it does not declare to write")

    __setitem__ = __delitem__ = __ior__ = __iadd__ = __iand__ = __isub__ = _refuse

    def __getattr__(self, name: str) -> Any:
        return self._refuse()


FIELDS = frozenset(each.name for each in fields(Context))

Callback = Callable[[Pass, fx.GraphModule], None]


@dataclass(frozen=True)
class Pipeline:
    """Passes in order; `callback(pass, gm)` is called after each. Those that are not `logged` leave nothing in logs and
    traces: what they make is only compared."""

    passes: Sequence[Pass]
    callback: Callback | None = None
    logged: bool = True

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if self.logged:
            trace("captured", gm)
        with ExitStack() as without_casts:
            self.run_each(gm, context, without_casts)
        if context.order is not None:
            _restore_caller_order(gm, context, context.order)
        gm.recompile()

    def run_each(self, gm: fx.GraphModule, context: Context, without_casts: ExitStack) -> None:
        """Once casts are written out, autocast around the program is off: it would cast what is excepted from it."""
        for step in self.passes:
            context.step = step.name
            before = short(gm.graph) if self.logged and log.isEnabledFor(logging.DEBUG) else ""
            with warnings.catch_warnings():
                # Open sizes stand in the arguments of nodes until the last pass (ringopt/ir/symbolic_sizes.py).
                warnings.filterwarnings("ignore", "Raw Sym")
                step.run(gm, cast(Context, View(context, step)))
            eliminate_dead_code(gm.graph)
            context.forget(gm.graph)
            if step.name == "choose_strategy":
                context.spreads = context.shards
            if self.logged:
                log.debug("after %s: %d nodes%s", step.name, len(gm.graph.nodes), changed(before, gm))
                trace(f"after_{step.name}", gm)
            if self.callback is not None:
                gm.recompile()
                self.callback(step, gm)
            if step.name == "normalize":
                without_casts.enter_context(no_autocast())


def _restore_caller_order(gm: fx.GraphModule, context: Context, order: Order) -> None:
    order.back.apply(gm.graph)
    context.left = {order.outputs[place]: where for place, where in context.left.items()}
    context.gathered = {order.outputs[place]: at for place, at in context.gathered.items()}
    context.canonical, context.order = order, None


def trace(when: str, gm: fx.GraphModule) -> None:
    """The graph as an artifact for tlparse, where TORCH_TRACE asks for them."""
    metadata = {"name": f"ringopt_{when}", "encoding": "string"}
    trace_structured("artifact", metadata.copy, payload_fn=lambda: gm.print_readable(print_output=False))


def changed(before: str, gm: fx.GraphModule) -> str:
    """The lines that a pass removed and added."""
    if not before:
        return ""
    lines = list(difflib.unified_diff(before.splitlines(), short(gm.graph).splitlines(), n=0, lineterm=""))[2:]
    return "".join(f"\n  {line[0]} {line[1:]}" for line in lines if not line.startswith("@@"))
