"""Exchanges that start before their attention: when they are posted, and that they are right and never get lost."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ringopt
from ringopt.backend import inner
from ringopt.distributed import tickets
from ringopt.distributed.mesh import PretendedMesh, register
from ringopt.distributed.tickets import issue, redeem, settle
from ringopt.drivers.compile import transform
from ringopt.errors import RingMismatchError
from ringopt.ir.nodes import op_name
from ringopt.options import Options
from ringopt.overlap.async_collectives import Budget
from ringopt.overlap.start_early import early_aot_eager, gap_before, inductor_settings, start_early
from ringopt.passes import sync_gradients
from ringopt.runtime.graph_boundary import examples
from tests.harness.lengths import run_over
from tests.harness.models import difference as error_of
from tests.harness.models import run
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.harness.translation import Seat, captured, difference, values_and_gradients

WIDTH, HEADS, KV_HEADS = 16, 4, 2


class Block(nn.Module):
    """Queries are projected first, so that an order that is left alone hides nothing."""

    def __init__(self, checkpointed: bool = False):
        super().__init__()
        narrow = WIDTH * KV_HEADS // HEADS
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, narrow), nn.Linear(WIDTH, narrow)
        self.o, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.checkpointed = checkpointed

    def attend(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) * 1.5
        k, v = (f(x).unflatten(-1, (KV_HEADS, -1)).transpose(1, 2) for f in (self.k, self.v))
        return self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + (checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 1, checkpointed: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(*(Block(checkpointed) for _ in range(blocks))), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).square().mean()


def data(n: int = 11, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, n, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Order(TorchDispatchMode):
    """The operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(op.name().split("::")[1].split(".")[0])
        return op(*args, **(kwargs or {}))


def on_ranks(p: int, model: nn.Module, x: Tensor, runner: Callable[..., Any], **options: Any) -> tuple[list[Any], Any]:
    """What `runner(compiled, inputs)` gives on each of p pretended ranks, and the report."""
    gm, inputs = captured(model, x)
    chosen = Options(inner_backend="aot_eager", **options)
    made = [transform(gm, inputs, chosen, Seat(rank, p)) for rank in range(p)]
    runs = [inner(one.graph, examples(inputs, one.given), chosen, None, one.budget) for one in made]
    expected = values_and_gradients(gm, inputs)
    found = run_on_threads(p, lambda mesh: runner(runs[mesh.rank], inputs))
    return [(one, expected) for one in found], made[0].report


def ordered(compiled: Any, inputs: Any) -> tuple[Any, list[str]]:
    with Order() as order:
        found = values_and_gradients(compiled, inputs)
    return found, order.ran


def shown(ran: list[str]) -> list[str]:
    """Products and exchanges; products that follow each other as one."""
    short = {"addmm": "mm", "mm": "mm", "ring_start": "start", "ring_attention": "ring"}
    short |= {"ring_backward_begin": "ring backward", "ring_backward_finish": "home"}
    short |= {"ring_attention_backward": "whole ring backward", "reduce_start": "reduce", "reduce_finish": "reduced"}
    short |= {"reduce_bucket": "whole reduce", "gather": "whole gather"}
    short |= {"gather_start": "gather", "gather_finish": "gathered"}
    short |= {"dilated_start": "start", "dilated_attention": "ring", "dilated_attention_backward": "ring backward"}
    names = [short[name] for name in ran if name in short]
    return [name for place, name in enumerate(names) if name != "mm" or names[place - 1 : place] != ["mm"]]


def test_exchanges_are_posted_before_what_needs_no_keys() -> None:
    found, report = on_ranks(2, Model(2).double(), data(), ordered, strategy="ring")
    for (values, ran), expected in found:
        assert not difference(expected, values)
        assert shown(ran) == [
            "mm", "start", "mm", "ring", "mm", "start", "mm", "ring", "mm",
            "start", "mm", "ring backward", "mm", "home", "start", "mm", "ring backward", "mm", "home", "mm",
            "whole gather", "reduce", "reduced",
        ]  # fmt: skip
        products = ran[: ran.index("ring_start")].count("addmm")
        assert products == 2, "keys and values are projected first, though the program begins with the queries"
        home = ran[ran.index("ring_backward_begin") : ran.index("ring_backward_finish")].count("mm")
        assert home >= 1, "the gradient of the queries' projection needs no gradients of keys"
    assert re.sub(r"[0-9.]+ [mu]?s", "T", report.sites[0].notes[-1]) == (
        "its exchange starts behind q (T); in the backward behind the gradients of o, up, down and 3 more (T), and "
        "ends behind those of q (T)"
    )


def test_inductor_is_told_of_the_ticket() -> None:
    """It lays out operands as they were when the graph was traced, and then there was no ticket among them: it is told
    of a number that is a tensor."""
    register(mesh := PretendedMesh(0, 2))

    def program(x: Tensor, k: Tensor, v: Tensor) -> Any:
        how = ("causal", "", [], 0.0, 1.0, "contiguous", "contiguous", "ring", "auto", mesh.name, "", "forward")
        return torch.ops.ringopt.ring_attention(x @ x.mT @ x, k, v, [], None, None, 8, 8, *how)

    graph = make_fx(program, tracing_mode="fake")(*torch.empty(3, 1, 1, 4, 2)).graph
    start_early(graph)
    (body,) = graph.find_nodes(op="call_function", target=torch.ops.ringopt.ring_attention.default)
    values, _ = body.meta["eager_input_vals"]
    assert op_name(body.args[-1]) == "ring_start" and [x.shape for x in values[:3]] == [(1, 1, 4, 2)] * 3
    assert len(values) == len(body.args) and (values[-1].shape, values[-1].dtype) == ((), torch.int64)


class Parallel(Block):
    """The branch beside the attention is written behind it, as in GPT-J."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.attend(x) + self.down(F.gelu(self.up(x)))).square().mean()


@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.zoo), 3])
def test_a_branch_that_is_written_behind_the_attention_is_computed_before_it(p: int) -> None:
    found, report = on_ranks(p, Parallel().double(), data(), ordered, strategy="ring")
    for (values, ran), expected in found:
        assert not difference(expected, values)
        assert ran[ran.index("ring_start") : ran.index("ring_attention")].count("addmm") == 3
    assert report.sites[0].notes[-1].startswith("its exchange starts behind q, up, down (")


@pytest.mark.zoo
def test_sums_of_gradients_are_waited_for_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_gradients, "BUCKET", 4000)
    found, _ = on_ranks(3, Model().double(), data(), ordered, strategy="ring")
    for (values, ran), expected in found:
        assert not difference(expected, values)
        names = shown(ran)
        started, ended = names.index("reduce"), names.index("reduced")
        assert "ring backward" in names[started:ended], "the first bucket travels while attention is computed"
        assert set(names[ended:]) <= {"reduce", "reduced"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("p", "strategy"), [(2, "gather"), (4, "ring2")])
def test_numbers(p: int, strategy: str) -> None:
    found, _ = on_ranks(p, Model().double(), data(13), values_and_gradients, strategy=strategy)
    for values, expected in found:
        assert not difference(expected, values)


@pytest.mark.zoo
def test_with_checkpointing() -> None:
    """Keys and values are computed again in the backward, and sent as soon as they are."""
    found, _ = on_ranks(2, Model(checkpointed=True).double(), data(), ordered, strategy="ring")
    for (values, ran), expected in found:
        assert not difference(expected, values)
        assert ran.count("ring_start") == 2 and ran.count("ring_attention") == 1


class Delayed(TorchDispatchMode):
    """Operators of ringopt begin late, by chance."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "ringopt":
            time.sleep(random.random() * 0.004)
        return op(*args, **(kwargs or {}))


@pytest.mark.zoo
def test_random_delays() -> None:
    def runner(compiled: Any, inputs: Any) -> list[Any]:
        with Delayed():
            return [values_and_gradients(compiled, inputs) for _ in range(10)]

    found, _ = on_ranks(3, Model().double(), data(), runner, strategy="ring")
    for runs, expected in found:
        assert not any(difference(expected, values) for values in runs)


class Fails(TorchDispatchMode):
    """Attention, on every rank."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.name() == "ringopt::ring_attention":
            raise ValueError("cut")
        return op(*args, **(kwargs or {}))


def test_a_run_that_is_cut_leaves_nothing_behind() -> None:
    def runner(compiled: Any, inputs: Any) -> Any:
        for _ in range(3):
            with pytest.raises(ValueError, match="cut"), Fails():
                compiled(*inputs)
        return values_and_gradients(compiled, inputs)

    found, _ = on_ranks(2, Model().double(), data(), runner, strategy="ring")
    for values, expected in found:
        assert not difference(expected, values)
    assert not tickets._started


def test_twice_backward_through_one_forward() -> None:
    def runner(compiled: Any, inputs: Any) -> list[Tensor]:
        x = inputs[0].detach().clone().requires_grad_()
        given = [x if given is inputs[0] else given for given in inputs]
        (loss,) = compiled(*given)
        return [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]

    found, _ = on_ranks(2, Model().double(), data(), runner, strategy="ring")
    for (first, again), _ in found:
        assert torch.equal(first, again)


# ---- tickets ---------------------------------------------------------------------------------------------------------
def test_a_ticket_is_good_once_and_for_one_thing() -> None:
    def body(mesh: ThreadMesh) -> None:
        ticket = issue(mesh, "this", 5, [])
        assert redeem(ticket, "this") == 5
        with pytest.raises(RingMismatchError, match="nothing that is under way"):
            redeem(ticket, "this")
        with pytest.raises(RingMismatchError, match="was given to that, and stands for this"):
            redeem(issue(mesh, "this", 5, []), "that")

    run_on_threads(2, body)


def test_what_nobody_can_finish_is_waited_for() -> None:
    def body(mesh: ThreadMesh) -> None:
        ours, theirs = torch.full((3,), float(mesh.rank)), torch.empty(3)
        ticket = issue(mesh, "this", None, [mesh.exchange([(1 - mesh.rank, ours)], [(1 - mesh.rank, theirs)], "lost")])
        settle(mesh)
        assert len(mesh.in_flight) > 0, "somebody still has the ticket"
        del ticket
        settle(mesh)
        assert theirs.tolist() == [1 - mesh.rank] * 3

    run_on_threads(2, body)


# ---- what is not started early ---------------------------------------------------------------------------------------
class Bare(nn.Module):
    """Nothing before attention, and nothing behind."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strategy": "ulysses"}, "its exchange starts with it: strategy ulysses sends queries too"),
        ({"strategy": "ring_q"}, "its exchange starts with it: strategy ring_q sends queries too"),
        (
            {"strategy": "ring", "inner_backend": "eager"},
            "its exchange starts with it: inner_backend='eager' has no graphs behind autograd to be ordered",
        ),
    ],
)
def test_reasons(options: dict[str, Any], sentence: str) -> None:
    report = ringopt.explain(Model(), data(dtype=torch.float32), world_size=2, options=options)
    assert report.sites[0].notes[-1] == sentence


class OpenHeads(nn.Module):
    """Blocks of four rows stand where heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            blocks = self.f(x).unflatten(1, (-1, 4))
            x = x + F.scaled_dot_product_attention(blocks, blocks, blocks).flatten(1, 2)
        return x


def test_a_number_of_heads_that_changes_with_the_length() -> None:
    """The start is told how many there are, and that number stands in no graph of autograd's making."""
    found = run_over(OpenHeads().double(), [(torch.randn(2, 12, WIDTH).double(),)], 2, dynamic=True)
    last = found.reports[-1].sites[0].notes[-1]
    assert last == "its exchange starts with it: its number of heads changes with the length"


def test_where_there_is_nothing_to_hide_behind() -> None:
    report = ringopt.explain(Bare(), data(dtype=torch.float32), world_size=2)
    assert report.sites[0].notes[-1] == (
        "its exchange starts with it, for nothing stands between that needs no K and V; in the backward with it, for "
        "it is the last"
    )


def test_random_numbers_and_messages_keep_their_places() -> None:
    """What is drawn for the keys is drawn after what is drawn for the queries, as the program has it; but by position
    nothing is drawn in an order."""

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k = F.dropout(x @ x.mT @ x, 0.5), F.dropout(x, 0.5)
            q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k))
            return F.scaled_dot_product_attention(q, k, k)

    gm, inputs = captured(Drops(), data(dtype=torch.float32))
    for by, free in (("torch", 0), ("position", 2)):
        flat = transform(gm, inputs, Options(strategy="ring", random=by), Seat(0, 2)).graph
        body = next(node for node in flat.graph.nodes if op_name(node) == "ring_attention")
        assert len(gap_before(body).products) == free


# ---- on ranks --------------------------------------------------------------------------------------------------------
def trained(inner_backend: str, dynamic: bool | None) -> tuple[float, list[str]]:
    torch._dynamo.reset()
    model, inputs = Model(), {"x": data(8, torch.float32)}
    options = {"inner_backend": inner_backend, "strategy": "ring"}
    compiled = torch.compile(model, backend="ring", options=options, dynamic=dynamic)
    run(compiled, model, {"x": data(13, torch.float32)} if dynamic else inputs)
    with torch.profiler.profile() as profile:
        found = run(compiled, model, inputs)
    told = ("ringopt::", "aten::addmm", "aten::mm")
    ran = sorted((event for event in profile.events() if event.name.startswith(told)), key=by_start)
    return error_of(found, run(model, model, inputs)), shown([event.name.split("::")[1] for event in ran])


def by_start(event: Any) -> float:
    return float(event.time_range.start)


@pytest.mark.parametrize(
    ("inner_backend", "dynamic"),
    [
        ("aot_eager", None),
        *(pytest.param(*each, marks=pytest.mark.zoo) for each in (("aot_eager", True), ("inductor", None))),
    ],
)
def test_on_ranks(ranks: Any, inner_backend: str, dynamic: bool | None) -> None:
    """Also with lengths that are open."""
    for error, ran in ranks(2, trained, inner_backend, dynamic):
        assert error < 1e-4
        assert ran[:4] == ["mm", "start", "mm", "ring"]
        assert ran.count("start") == 2
        begun = ran.index("ring backward")
        assert ran[begun : begun + 3] == ["ring backward", "mm", "home"]


def test_settings_stay_with_the_graphs_of_ringopt() -> None:
    before = torch._inductor.config.reorder_for_peak_memory
    assert inductor_settings(torch.fx.symbolic_trace(lambda x: x + 1), Budget()) == {}
    assert torch._inductor.config.reorder_for_peak_memory is before
    assert torch._inductor.config.post_grad_custom_post_pass is None


def test_views_where_fake_strides_are_not_the_real_ones() -> None:
    """The gradient of elu lies in memory as the gradient behind it does; its fake kernel follows the operand."""
    x = torch.randn(2, 24, requires_grad=True)
    elu = lambda x: F.elu(x.view(2, 3, 8).transpose(1, 2)).contiguous()  # noqa: E731
    y = torch.compile(elu, backend=partial(early_aot_eager, budget=Budget()))(x)
    (found,), (expected,) = (torch.autograd.grad(out, x, torch.ones(2, 8, 3)) for out in (y, elu(x)))
    torch.testing.assert_close(found, expected)
