"""Outputs that are not gathered: lazy whole tensors, and this rank's rows."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from ringopt.errors import OptionError, RingCommError, RingMismatchError
from ringopt.tensor.lazy import Lazy, Shard
from tests.harness.errors import worst_of
from tests.harness.models import difference
from tests.sharding.programs import D, H


class Attention(nn.Module):
    """A transformer's block without its MLP."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, H, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, n, D))


class Model(nn.Module):
    """A loss, and the logits beside it."""

    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head, self.breaks = Attention(), Attention(), nn.Linear(D, 50), breaks
        self.double()

    def forward(self, x, labels):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.second(x)
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def data(n=13):
    torch.manual_seed(1)
    return torch.randn(2, n, D, dtype=torch.float64), torch.randint(0, 50, (2, n))


def compiled(model, outputs, **options):
    torch._dynamo.reset()
    chosen = {"outputs": outputs, "inner_backend": "aot_eager", "timeout": 20, **options}
    return torch.compile(model, backend="ring", options=chosen)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


# ---- an output that nobody reads, and one that is read ---------------------------------------------------------------
def loss_and_logits():
    model, (x, labels) = Model(), data()
    expected, all_logits = model(x, labels)
    wanted = gradients(model, expected + all_logits.pow(2).mean()), gradients(model, model(x, labels)[0])
    run, sent = compiled(model, "lazy"), []
    run(x, labels)  # compares inputs and arguments, once
    for read in (True, False):
        with ringopt.record_traffic() as traffic:
            loss, logits = run(x, labels)
            sent.append(traffic.bytes_sent)
            assert isinstance(logits, torch.Tensor) and logits.shape == all_logits.shape and logits.requires_grad
            total = loss + logits.pow(2).mean() if read else loss
            sent.append(traffic.bytes_sent)
        error = difference([loss, *gradients(model, total)], [expected, *wanted[not read]])
        assert error < 1e-9, error
        if read:
            assert torch.allclose(logits, all_logits, rtol=1e-12)
    return sent, ringopt.reports()[-1].outputs


@pytest.mark.zoo
def test_only_what_is_read_is_gathered(ranks):
    for (before, after, unread, still), (output,) in ranks(2, loss_and_logits):
        assert before == unread == still
        assert after - before == 7 * 2 * 50 * 8 + 5 * 8  # the longer shard, and a header of 5 words
        assert (output.form, output.placement, output.bytes) == ("lazy", "S(1)", 2 * 13 * 50 * 8)
        assert output.name.startswith("output 1 (linear")


def every_reader():
    model, (x, labels) = Model(), data()
    run, expected = compiled(model, "lazy"), model(x, labels)[1].detach()
    lazy = lambda: run(x, labels)[1]  # noqa: E731
    file, leaf = io.BytesIO(), lazy().detach()
    assert isinstance(leaf, Lazy) and not leaf.shard.is_read
    torch.save(leaf, file)
    file.seek(0)
    written = lazy()
    written *= 2
    assert isinstance(written, Lazy)
    kept = lazy()
    kept.retain_grad()
    kept.sum().backward()
    found = {
        "numpy": torch.from_numpy(lazy().detach().numpy()),
        "list": torch.tensor(lazy().tolist(), dtype=torch.float64),
        "saved": torch.load(file),
        "pickled": pickle.loads(pickle.dumps(lazy())).detach(),
        "copied": copy.deepcopy(leaf),
        "pointer": leaf if leaf.data_ptr() == leaf.data_ptr() != 0 else None,
        "written": written / 2,
        "an element": torch.full_like(expected, lazy()[1, 12, 7].item() - float(expected[1, 12, 7])) + expected,
        "another dtype": lazy().float().double(),
        "a list of them": torch.stack([lazy(), lazy()])[1],
        "its gradient": kept.grad - 1 + expected,
        "shown": expected if repr(lazy()).startswith("Lazy([[[") else None,
        "compiled by others": torch.compile(lambda t: t * 2 - 1, backend="aot_eager")(lazy()) / 2 + 0.5,
    }
    with torch.inference_mode():
        found["inference"] = lazy() + 0
    return [name for name, value in found.items() if value is None or not torch.allclose(value, expected, rtol=1e-6)]


@pytest.mark.zoo
def test_whoever_reads_it_finds_the_whole(ranks):
    assert ranks(2, every_reader) == [[], []]


def read_alone(how):
    model, (x, labels) = Model(), data()
    run = compiled(model, "lazy", timeout=12 if how == "one rank" else 60)
    first, second = run(x, labels)[1], run(x, labels)[1]
    try:
        if how == "one rank" and dist.get_rank() == 0:
            return float(first.sum())
        if how == "in another order":
            (first, second)[dist.get_rank()].sum()
    except (RingCommError, RingMismatchError) as error:
        return type(error).__name__, str(error)


@pytest.mark.zoo
def test_a_rank_that_reads_alone_is_told(ranks):
    (kind, said), _ = ranks(2, read_alone, "one rank")
    assert kind == "RingCommError"
    assert "rank 0 read output 1 (linear" in said and "read it before `if rank == 0`" in said


@pytest.mark.zoo
def test_ranks_that_read_different_outputs_are_told(ranks):
    for kind, said in ranks(2, read_alone, "in another order"):
        assert kind == "RingMismatchError" and "read numbers [1, 2]" in said.replace("[3, 4]", "[1, 2]")


# ---- from graph to graph ---------------------------------------------------------------------------------------------
def handed_on(how, outputs, lengths):
    """The largest error, and the bytes gathered by a forward of the last length."""
    model, errors = Model(breaks=how == "breaks"), []
    run = compiled(model, outputs)
    if how == "blocks":
        run = model
        for block in (model.first, model.second):
            block.compile(backend="ring", options={"outputs": outputs, "inner_backend": "aot_eager"})
    for n in lengths:
        x, labels = data(n)
        with torch.compiler.set_stance("force_eager"):
            loss, logits = model(x, labels)
            wanted = [loss.detach(), logits.detach(), *gradients(model, loss + logits.mean())]
        run(x, labels)
        with ringopt.record_traffic() as traffic:
            loss, logits = run(x, labels)
        if outputs == "local":
            assert logits.shape[1] < n
            logits = ringopt.unshard(logits, 1, length=n, layout=ringopt.reports()[-1].outputs[0].layout)
        found = [loss.detach(), logits.detach(), *gradients(model, loss + logits.mean())]
        errors.append(difference(found, wanted))
    return worst_of(*errors), sum(event.bytes for event in traffic.events if event.kind == "all_gather")


def read_at_lengths(lengths):
    """The largest error of logits that are read and of gradients, and how many graphs were made."""
    model, errors = Model(), []
    run, before = compiled(model, "lazy"), len(ringopt.reports())
    for n in lengths:
        x, labels = data(n)
        with torch.compiler.set_stance("force_eager"):
            loss, logits = model(x, labels)
            wanted = [loss.detach(), logits.detach(), *gradients(model, loss + logits.pow(2).mean())]
        loss, logits = run(x, labels)
        assert isinstance(logits, Lazy) and logits.shape == (2, n, 50) and not logits.shard.is_read
        found = [loss.detach(), logits.detach(), *gradients(model, loss + logits.pow(2).mean())]
        errors.append(difference(found, wanted))
    return worst_of(*errors), len(ringopt.reports()) - before


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_one_graph_serves_all_lengths(ranks, p):
    """The first length has one of its own; how far an output reaches is worked out at each call."""
    for error, graphs in ranks(p, read_at_lengths, (13, 17, 24, 31, 18, 40, 13, 23)):
        assert error < 1e-9 and graphs == 2


@pytest.mark.parametrize("outputs, lengths", [pytest.param("lazy", (13, 17), marks=pytest.mark.zoo), ("local", (17,))])
def test_rows_go_over_graph_breaks(ranks, outputs, lengths):
    """With "local" too what crosses a break is a whole tensor to the program; only the last graph returns rows."""
    for error, gathered in ranks(2, handed_on, "breaks", outputs, lengths):
        assert error < 1e-9 and gathered == 0


def test_rows_go_from_block_to_block(ranks):
    """The head outside reads what the last block returns."""
    for error, gathered in ranks(3, handed_on, "blocks", "lazy", (17,)):
        assert error < 1e-9 and gathered == 2 * (2 * 6 * D * 8) + 2 * 5 * 8


def written_between_graphs(layout):
    """The output of one graph is read, written, and handed to a second; and one that is written unread."""
    model, (x, _) = Model(), data(17)
    run, other = compiled(model.first, "lazy"), torch.compile(model.second, backend="ring", options={"layout": layout})
    errors = []
    with torch.no_grad():
        for reads in (True, False):
            expected, found = model.first(x), run(x)
            assert isinstance(found, Lazy)
            if reads:
                found.sum()
            expected[:, 3:7] *= 2
            found[:, 3:7] *= 2
            errors.append(difference([other(found)], [model.second(expected)]))
    return errors


@pytest.mark.zoo
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_what_is_written_before_the_next_graph_is_seen_by_it(ranks, layout):
    """In another layout too, where the rows that a rank holds are not those that the next graph wants."""
    for errors in ranks(2, written_between_graphs, layout):
        assert worst_of(*errors) < 1e-9


def two_layouts():
    """A gradient that comes in the rows of another layout is not taken as it is."""
    model, (x, _) = Model(), data(17)
    given = x.clone().requires_grad_()
    model.second(model.first(given)).square().sum().backward()
    wanted = [given.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    first, second = (
        torch.compile(
            block, backend="ring", options={"layout": layout, "outputs": "lazy", "inner_backend": "aot_eager"}
        )
        for block, layout in ((model.first, "contiguous"), (model.second, "zigzag"))
    )
    given = x.clone().requires_grad_()
    second(first(given)).square().sum().backward()
    return difference([given.grad, *(p.grad for p in model.parameters() if p.grad is not None)], wanted)


@pytest.mark.zoo
@pytest.mark.parametrize("p", (2, 3))
def test_graphs_of_two_layouts_hand_on_rows_and_gradients(ranks, p):
    assert max(ranks(p, two_layouts)) < 1e-9


# ---- inputs that come in rows ----------------------------------------------------------------------------------------
def from_rows(layout, n):
    """Losses, logits and gradients of the program against one process; that of this rank's rows of x too."""
    model, (x, labels) = Model(), data(n)
    whole = x.clone().requires_grad_()
    loss, logits = model(whole, labels)
    (loss + logits.mean()).backward()
    wanted = [loss.detach(), logits.detach(), *(p.grad.clone() for p in model.parameters()), whole.grad]
    model.zero_grad()
    rows, its_labels = (ringopt.shard(t, 1, layout=layout).clone() for t in (x, labels))
    rows.requires_grad_()
    before = len(ringopt.reports())
    run = compiled(model, "gather")
    with ringopt.record_traffic() as traffic:
        loss, logits = run(*(ringopt.from_rows(t, 1, layout=layout) for t in (rows, its_labels)))
    (loss + logits.mean()).backward()
    gradient = ringopt.unshard(rows.grad, 1, length=n, layout=layout)
    found = [loss.detach(), logits.detach(), *(p.grad for p in model.parameters()), gradient]
    (report,) = ringopt.reports()[before:]
    read = [event.label for event in traffic.events if event.label.startswith("read")]
    return difference(found, wanted), report.sharded_fraction, report.sites[0].layout, read


@pytest.mark.sample(2)
@pytest.mark.parametrize("p, layout, n", [(2, "zigzag", 13), (3, "contiguous", 17)])
def test_a_loader_that_shards(ranks, p, layout, n):
    for error, sharded, used, read in ranks(p, from_rows, layout, n):
        assert error < 1e-9 and (sharded, used, read) == (1.0, layout, [])


def plain_rows():
    model, (x, labels) = Model(), data(12)
    run, rows = compiled(model, "gather", inputs="local"), [ringopt.shard(t, 1) for t in (x, labels)]
    loss, _logits = run(*(ringopt.from_rows(t, 1) for t in rows))
    torch.testing.assert_close(loss, model(x, labels)[0])
    try:
        run(*rows)
    except Exception as error:
        return str(error)


@pytest.mark.zoo
def test_rows_have_to_be_told_from_short_sequences(ranks):
    for said in ranks(2, plain_rows):
        assert "inputs='local': no input comes in rows; found x [2, 6, 8], labels [2, 6]" in said
        assert "pass each as ringopt.from_rows(x, dim)" in said


def read_in_any_order():
    """Rows as a graph left them: tokens first, and any stride where there is one entry."""
    like = ringopt.from_rows(torch.randn(1, 2, 6, D), 2)
    rows = torch.randn(1, 6, 2, D).transpose(1, 2).as_strided((1, 2, 6, D), (D, D, 2 * D, 1))
    lazy = Lazy(Shard(rows, like.shard.spread))
    lazy.sum()
    return lazy.shard.is_read, lazy._rows.stride() == rows.stride(), torch.equal(lazy._rows, rows)


def test_a_tensor_that_was_read_has_rows_as_they_lay(ranks):
    """A graph that was compiled for their strides is run with them: Dynamo looks at them again when it is done."""
    assert ranks(2, read_in_any_order) == [(True, True, True)] * 2


def wrong_rows(what):
    rank, (x, _labels) = dist.get_rank(), data(12)
    x = x[:, : 5 + 2 * rank] if what == "cut" else x[: 1 + rank, :6]
    try:
        ringopt.from_rows(x, 1)
    except RingMismatchError as error:
        return str(error)


def test_rows_that_are_not_of_one_tensor(ranks):
    for said in ranks(2, wrong_rows, "cut"):
        assert "the ranks hold [5, 7] rows, and a contiguous sequence of 12 is cut into [6, 6]" in said
    for said in ranks(2, wrong_rows, "batch"):
        assert "the ranks do not pass rows of one tensor" in said
    assert ringopt.from_rows(data()[0], 1).shape == (2, 13, D)  # of one process all rows are here
    with pytest.raises(OptionError, match="dim=3"):
        ringopt.from_rows(data()[0], 3)


# ---- told beforehand -------------------------------------------------------------------------------------------------
def test_explain_says_what_is_not_gathered():
    whole, lazy = (
        ringopt.explain(Model(), *data(16), world_size=4, options={"outputs": outputs})
        for outputs in ("gather", "lazy")
    )
    (output,), (gathered,) = lazy.outputs, whole.gathers
    assert gathered.op == "output" and gathered.bytes == output.bytes == 2 * 16 * 50 * 8
    assert whole.outputs == () and lazy.gathers == ()
    assert whole.bytes_sent - lazy.bytes_sent == output.bytes * 3 // 4
    assert output.name in lazy.text(verbose=True) and "head" in output.name


def test_an_unknown_form_is_an_error():
    with pytest.raises(OptionError, match="option outputs='sharded': expected one of 'gather', 'lazy', 'local'"):
        ringopt.explain(Model(), *data(), options={"outputs": "sharded"})
