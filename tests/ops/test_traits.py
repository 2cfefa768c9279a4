"""The table of traits: a row an operator, and what a row says is sent is what the mesh counts, forward and backward, in
the report, the plan and the diff."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringopt.compare.node_facts import Reader
from ringopt.context_parallel.geometry.layouts import LAYOUTS, layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.cost.dilated import dilated_bytes
from ringopt.cost.message_bytes import bytes_sent
from ringopt.distributed.traffic import record_traffic
from ringopt.ops import operators as ops
from ringopt.ops.expansion import ExpansionCall
from ringopt.ops.fetch_rows import Wanted, apart, homes_and_wants, moved, taken, window_rows
from ringopt.ops.ring import VERSION
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traffic import dilated_plan, heads_of, ring_plan
from ringopt.ops.traits import TABLE, attends, check_rows, gradient_bytes, is_start
from ringopt.planner.trace_model import sent_by_others
from ringopt.reporting.figures import Figures, sent_by
from ringopt.rules.declare import ScanRule
from ringopt.scans.body import to_text
from ringopt.scans.kernel import ScanKernel
from tests.harness.kernels import DELTA, IN_TURN, LIBRARY, H, K, V
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.scans.bodies import Scan, delta_rule, stabilised


@dataclass(frozen=True)
class At:
    """A rank of a mesh, and a sequence of `n` rows of which it has some."""

    mesh: ThreadMesh
    n: int
    layout: str

    @property
    def group(self) -> str:
        return self.mesh.name

    def rows(self, n: int | None = None) -> int:
        return count(layout_of(self.layout, n or self.n, self.mesh.size).ranges(self.mesh.rank))


def given(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def fetch(at: At, wanted: Any) -> Tensor:
    made = at.rows(wanted.length) if not wanted.everywhere else wanted.length
    how = (1, 2, at.n, 3, wanted.form, wanted.numbers, made, at.layout, at.group)
    return ops.fetch_rows(given(2, 6 * at.rows(), 5), *how)


def edges(at: At) -> Tensor:
    """What a causal window of four rows sees of neighbours."""
    wanted = Wanted("edges", window_rows(at.n, 1, -3, 4).pieces)
    rows = [each[at.mesh.rank] for each in homes_and_wants(wanted, at.layout, at.n, at.mesh.size)]
    how = (1, 1, at.n, 1, wanted.form, wanted.numbers, len(rows[1]), at.layout, at.group)
    return ops.fetch_rows(given(2, len(rows[0]), 5), *how)


def gather_in_halves(at: At) -> Tensor:
    x, place = given(2, 6 * at.rows()).detach(), (1, 2, at.n, 3, at.layout)
    return ops.gather_finish(ops.gather_start(x, *place, 0, at.group), x, *place, at.group)


def sum_in_halves(at: At) -> Tensor:
    x = torch.randn(7)
    sizes = ([7, 7], [1, 1], x.dtype, x.device, at.group)
    return ops.reduce_finish(ops.reduce_start([x, x], 0, at.group), *sizes)[0]


def convolved(at: At) -> Tensor:
    wanted = window_rows(at.n, 1, -1, 3)
    how = (wanted.numbers, [1], [0], [1], 1, at.rows(), at.layout, at.group)
    return ops.convolve_rows(given(2, 4, at.rows()), given(4, 4, 3), given(4), 2, at.n, *how)


def turned(at: At) -> Tensor:
    layouts = (at.layout, at.layout)
    return ops.turn(given(2, at.rows(), 24), 1, [1, at.n, 1], 2, [1, 24, 1], at.rows(24), *layouts, at.group)


def respread(at: At) -> Tensor:
    n = 4 * at.n
    how = ([1, n, 1], [1, at.n, 4], at.rows(), at.layout, "contiguous" if at.layout == "zigzag" else "zigzag", at.group)
    made = count(layout_of(how[4], at.n, at.mesh.size).ranges(at.mesh.rank))
    return ops.respread(given(2, at.rows(n), 3), 1, *how[:2], made, *how[3:])


def shares(at: At) -> tuple[Tensor, Tensor, Tensor]:
    return given(2, 4, at.rows(), 8), given(2, 4, at.rows(), 8), given(2, 4, at.rows(), 4)


def config(at: At, strategy: str, pattern: str, dropout: float, replicated: bool = False) -> tuple[Any, ...]:
    layouts = ("replicated" if replicated else at.layout, at.layout)
    return (at.n, at.n, pattern, "", [], dropout, 0.5, *layouts, strategy, "auto", at.group, VERSION)


def ring(strategy: str, pattern: str = "causal", dropout: float = 0.0) -> Callable[[At], Tensor]:
    def call(at: At) -> Tensor:
        seed = torch.tensor(3) if dropout else None
        out: Tensor = ops.ring_attention(*shares(at), [], None, seed, *config(at, strategy, pattern, dropout))[0]
        return out

    return call


def of_latents(strategy: str) -> Callable[[At], Tensor]:
    """K and V of two heads are linear in three numbers."""
    graph, aten = fx.Graph(), torch.ops.aten
    kv = graph.call_function(aten.linear.default, (graph.placeholder("z"), graph.placeholder("weight")))
    heads = graph.call_function(aten.reshape.default, (kv, [-1, 2, 2, 12]))
    both = graph.call_function(aten.permute.default, (heads, [1, 2, 0, 3]))
    graph.output(tuple(graph.call_function(aten.slice.Tensor, (both, 3, *of)) for of in ((0, 8), (8, 12))))
    text = ExpansionCall(to_text(fx.GraphModule({}, graph), 0, 1, 1), 0, 2, 8, 4, 288).to_text()

    def call(at: At) -> Tensor:
        latent, none = given(1, 1, at.rows(), 3), torch.empty(1, 1, at.rows(), 0)
        plain = config(at, strategy, "causal", 0.0)
        how = (*plain[:4], [0], *plain[5:], "", None, text)
        out: Tensor = ops.ring_attention(shares(at)[0], latent, none, [given(48, 3)], None, None, *how)[0]
        return out

    return call


def merged(at: At) -> Tensor:
    q = given(2, 4, at.n, 8)
    out: Tensor = ops.ring_attention(q, *shares(at)[1:], [], None, None, *config(at, "merge", "full", 0.0, True))[0]
    return out


def ring_in_halves(at: At) -> Tensor:
    q, k, v = (x.detach() for x in shares(at))
    how = config(at, "ring", "causal", 0.0)
    out, lse = ops.ring_attention(q, k, v, [], None, None, *how)
    ticket = ops.ring_start(k, v, 4, True, 0, *how)
    begun = ops.ring_backward_begin(out, q, k, v, out, lse, [], None, None, *how, "backward home", ticket)
    return ops.ring_backward_finish(begun[1], k, v, at.group)[0]


def dilated(pattern: str, strategy: str = "auto", early: bool = False) -> Callable[[At], Tensor]:
    def call(at: At) -> Tensor:
        q, k, v = shares(at)
        how = (at.n, pattern, 0.0, 0.5, at.layout, strategy, "auto", at.group, VERSION)
        ticket = ops.dilated_start(k.detach(), v.detach(), 4, False, 0, *how) if early else None
        more = ("forward", ticket) if early else ()
        if early:
            q, k, v = (x.detach() for x in (q, k, v))
        out: Tensor = ops.dilated_attention(q, k, v, None, None, None, *how, *more)[0]
        return out

    return call


def scanned(of: Scan, text: str, keeps: bool = True) -> Callable[[At], Tensor]:
    def call(at: At) -> Tensor:
        init, consts = ([x.detach().requires_grad_() for x in part] for part in (of.init, of.consts))
        xs = [x.detach()[0].expand(at.rows(), *x.shape[1:]).clone().requires_grad_() for x in of.xs]
        segments = LAYOUTS[at.layout].chunks_per_rank * at.mesh.size if keeps else 0
        found: list[Tensor] = ops.sharded_scan(init, xs, consts, text, at.n, segments, at.layout, True, at.group)
        return sum(x.sum() for x in found[: len(init) + 1])  # type: ignore[return-value]

    return call


def scan_in_halves(of: Scan, text: str) -> Callable[[At], Tensor]:
    def call(at: At) -> Tensor:
        segments = LAYOUTS[at.layout].chunks_per_rank * at.mesh.size
        xs = [x.detach()[0].expand(at.rows(), *x.shape[1:]).clone() for x in of.xs]
        given, where = ([of.init[0].detach()], xs, [], text), (at.n, segments, at.layout, True, at.group)
        ticket = ops.scan_start(*given, 0, *where)
        *results, starts, matrices = ops.sharded_scan(*given, *where, "forward backward", ticket)
        back = ops.scan_backward_start(results, [starts, matrices], *given, 0, *where)
        early = ("forward backward", back)
        grad: Tensor = ops.sharded_scan_backward(results, [starts, matrices], *given, [1], *where, *early)[0]
        return grad

    return call


def by_kernel(rule: ScanRule, early: bool = False) -> Callable[[At], Tensor]:
    """The rule of the stand-in for a library's kernel, without a last state that anybody reads."""
    places = tuple(rule.tokens.index(name) for name in rule.additive)
    kernel = ScanKernel(f"{LIBRARY}::delta_rule", rule.tokens, ("decay",), (("bounded", False),), "state", 1, 1,
                        rule.axes, places)  # fmt: skip

    def call(at: At) -> Tensor:
        xs = [given(2, at.rows(), H, size) for size in (K, K, V)]
        segments = LAYOUTS[at.layout].chunks_per_rank * at.mesh.size
        operands = given(2, H, K, V), [*xs, given(2, at.rows(), H)], [given(H)]
        where = (at.n, segments, at.layout, at.group)
        more = ("forward", ops.kernel_scan_start(*operands, kernel.text, 0, *where)) if early else ()
        found: list[Tensor] = ops.sharded_kernel_scan(*operands, kernel.text, *where, *more)
        return found[0].detach() if early else found[0]

    return call


# Each makes calls, of which the result has a gradient or none.
CALLS: dict[str, Callable[[At], Tensor]] = {
    "scatter": lambda at: ops.scatter(given(2, 6 * at.n), 1, 2, at.n, 3, at.rows(), at.layout, at.group),
    "gather": lambda at: ops.gather(given(2, 6 * at.rows()), 1, 2, at.n, 3, at.layout, at.group),
    "gather in halves": gather_in_halves,
    "reduce_from_group": lambda at: ops.reduce_from_group(given(5, 3), at.group),
    "reduce_bucket": lambda at: ops.reduce_bucket([torch.randn(5), torch.randn(2, 3)], at.group)[0],
    "sum in halves": sum_in_halves,
    "copy_to_group": lambda at: ops.copy_to_group(given(5), at.group),
    "copy_all_to_group": lambda at: sum(x.sum() for x in ops.copy_all_to_group([given(5), given(2, 2)], at.group)),
    "leave_to_wrapper": lambda at: ops.leave_to_wrapper(given(5), at.mesh.size),
    "a shift": lambda at: fetch(at, moved((-1, 1, at.n))),
    "rows backwards": lambda at: fetch(at, moved((at.n - 1, -1, at.n - 2))),
    "rows on all ranks": lambda at: fetch(at, taken((1, 3, 3))),
    "edges of windows": edges,
    "rows put apart": lambda at: fetch(at, apart(2 * at.n, 2, 1)),
    "look_up_rows": lambda at: ops.look_up_rows(
        given(2, at.rows(), 3), torch.tensor([0, 0, 1]), 1, at.n, at.layout, at.group
    ),
    "respread": respread,
    "turn": turned,
    "convolve_rows": convolved,
    "extreme": lambda at: ops.extreme(given(at.rows(), 3, 5), [0, 1], True, at.group),
    "running_sum": lambda at: ops.running_sum(given(2, at.rows(), 3), 1, at.n, False, at.layout, at.group),
    "agreed_seeds": lambda at: ops.agreed_seeds(torch.tensor([3, 5]), at.group),
    "dropout": lambda at: ops.dropout(given(5), torch.tensor(3), 0.5, at.group)[0],
    "ring": ring("ring"),
    "ring, full": ring("ring", "full"),
    "ring, window": ring("ring", "window(5)"),
    "gathered keys": ring("gather"),
    "ulysses": ring("ulysses"),
    "ring of latents": of_latents("ring"),
    "gathered latents": of_latents("gather"),
    "dropout of weights": ring("ring", "causal", 0.5),
    "merge": merged,
    "ring in halves": ring_in_halves,
    "dilated": dilated("dilated(8:1,16:2)"),
    "a scan": scanned(delta_rule(1), delta_rule(1).text),
    "a scan for any number of ranks": scanned(delta_rule(1), delta_rule(1).text, keeps=False),
    "a scan in halves": scan_in_halves(delta_rule(1), delta_rule(1).text),
    "a stabilised scan": scanned(stabilised(1), stabilised(1).text),
    "a kernel's scan": by_kernel(DELTA),
    "a kernel's scan in turn": by_kernel(IN_TURN),
    "a kernel's scan, started early": by_kernel(DELTA, early=True),
    "dilated, started early": dilated("dilated(8:1,16:2)", "auto", True),
}
# Composite ones are seen by what they call, and the others name no group, or only ask for a number of rows.
UNSEEN = {
    "attention", "flex", "tabulate", "custom_gradient", "rows_here", "copy_to_group", "copy_all_to_group",
    "leave_to_wrapper", "snapshot", "seeds", "draw", "drawn", "scan", "scan_backward", "picked", "picked_backward",
    "mask_facts",
}  # fmt: skip


class Calls(TorchDispatchMode):
    """The calls of operators of ringopt in this thread, as nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "ringopt":
            known = lambda x: self.known(x) if isinstance(x, Tensor) else x  # noqa: E731
            node = self.graph.call_function(func, *torch.utils._pytree.tree_map(known, (tuple(args), kwargs or {})))
            node.meta["val"] = out
        return out

    def known(self, x: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = x.detach()
        return node


@dataclass(frozen=True)
class Sent:
    """By one rank: what was counted, and what the report, the plan and the diff say of the same calls. `row`: what the
    rows of the forward's calls say of the backward."""

    counted: int
    report: int
    plan: int
    diff: int | None
    names: frozenset[str]
    row: int


def sent(at: At, call: Callable[[], Any]) -> Sent:
    ranks, rank = at.mesh.size, at.mesh.rank
    with record_traffic() as traffic, Calls() as calls:
        call()
    graph = calls.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    reader = Reader(graph, ranks)
    told = [reader.of(node).bytes_sent for node in nodes]
    beside = sum(one.at(ranks) for one in sent_by_others([fx.GraphModule({}, graph)], ranks, rank, at.n))
    sized = [SizedCall.of(node, ranks, rank) for node in nodes]
    return Sent(
        traffic.of(rank).bytes_sent,
        sent_by(graph, Figures(graph, at.mesh)),
        beside + sum(planned(node, one) for node, one in zip(nodes, sized, strict=True) if attends(node)),
        None if None in told else sum(told),
        frozenset(one.name for one in sized),
        sum(map(gradient_bytes, sized)),
    )


def planned(node: fx.Node, call: SizedCall) -> int:
    """Of an attention, as the plan has it; its seed is no part of that."""
    backward = attends(node) == "backward"
    seed = 8 * (call.ranks - 1) if call.arguments["seed"] is not None and not backward else 0
    if call.name.startswith("dilated"):
        return dilated_bytes(dilated_plan(call), heads_of(call), call.rank, backward) + seed
    return bytes_sent(ring_plan(call), heads_of(call), call.rank, backward) + seed


def both_ways(name: str, p: int, n: int, layout: str) -> list[tuple[Sent, Sent | None]]:
    def body(mesh: ThreadMesh) -> tuple[Sent, Sent | None]:
        torch.manual_seed(mesh.rank)
        at, made = At(mesh, n, layout), list[Tensor]()
        CALLS[name](at)  # the ranks compare what is new to them
        forward = sent(at, lambda: made.append(CALLS[name](at)))
        (out,) = made
        if not out.requires_grad:
            return forward, None
        out.sum().backward()
        again = CALLS[name](at).sum()
        return forward, sent(at, again.backward)

    return run_on_threads(p, body)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "p, n, layout", [(2, 32, "contiguous"), (2, 35, "zigzag"), (4, 37, "contiguous"), (4, 35, "zigzag")]
)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_said_to_be_sent_is_sent(name: str, p: int, n: int, layout: str) -> None:
    found = both_ways(name, p, n, layout)
    for forward, backward in found:
        for way in (forward, backward):
            if way is not None:
                assert way.report == way.plan == way.diff, (name, way)
                few = way.names == {"look_up_rows"} and way.counted < way.report
                assert way.counted == way.report or few, (name, way)
        if backward is not None and forward.names:
            assert forward.row == backward.report, name
    if name == "look_up_rows":  # of the rank that has them all
        assert max(forward.counted for forward, _backward in found) == found[0][0].report


def test_every_operator_is_called_above() -> None:
    called = {name for way in map(names_of, CALLS) for name in way}
    assert called | UNSEEN == set(TABLE)
    assert not any(TABLE[name].sends for name in UNSEEN)


def names_of(name: str) -> set[str]:
    forward, backward = both_ways(name, 2, 32, "contiguous")[0]
    return {*forward.names, *(backward.names if backward is not None else ())}


@pytest.mark.parametrize("name", TABLE)
def test_a_row_agrees_with_the_operator(name: str) -> None:
    overload, row = getattr(ops, name).default, TABLE[name]
    assert row.talks == any(argument.name == "group" for argument in overload._schema.arguments)
    assert row.silent or row.talks
    assert row.capturable == (torch.Tag.cudagraph_unsafe not in overload.tags)
    assert {row.start, *(row.halves or ())} <= {"", *TABLE}
    nodes = [fx.Graph().call_function(getattr(ops, half).default) for half in row.halves or ()]
    assert not nodes or [is_start(half) for half in nodes] == [True, False]


def test_an_operator_without_a_row_is_refused() -> None:
    names = [f"ringopt::{name}" for name in TABLE]
    check_rows([*names, "aten::add.Tensor"])
    with pytest.raises(TypeError, match=r"without a row .*\['scater'\]"):
        check_rows([*names, "ringopt::scater"])
    with pytest.raises(TypeError, match=r"rows without an operator: \['attention'\]"):
        check_rows(name for name in names if name != "ringopt::attention")


def test_whoever_imports_the_operators_has_their_rows_checked() -> None:
    with patch.dict(TABLE), pytest.raises(TypeError, match=r"without a row .*\['gather'\]"):
        del TABLE["gather"]
        importlib.reload(importlib.import_module("ringopt.ops"))
