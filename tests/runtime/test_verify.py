"""`verify=True`: the first call of every compiled graph is compared with the program it was made from."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from ringopt.calls import OpCall
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.process import ProcessMesh
from ringopt.errors import ProgramError, VerificationError
from ringopt.ops import operators
from ringopt.passes.classify_mask import ClassifyMask
from ringopt.runtime.verify import Original, Verified
from tests.harness.models import run
from tests.programs.test_checkpoint import Blocks, data
from tests.tensor.test_lazy import Model
from tests.tensor.test_lazy import data as rows_and_labels


class Heard(logging.Handler):
    """What verification says while it is the context."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        if "verify" in (record.name.rpartition(".")[2], record.getMessage().partition(":")[0]):
            self.said.append(record.getMessage())

    def __enter__(self):
        self.log = logging.getLogger("ringopt.runtime.verify")
        self.level, _ = self.log.level, self.log.setLevel(logging.INFO)
        logging.getLogger("ringopt").addHandler(self)
        return self

    def __exit__(self, *_):
        self.log.setLevel(self.level)
        logging.getLogger("ringopt").removeHandler(self)

    @property
    def agreed(self):
        return sum("values agree" in said for said in self.said)


def compiled(module, **options):
    torch._dynamo.reset()
    return torch.compile(module, backend="ring", options={"verify": True, "inner_backend": "eager", **options})


# ---- where all is well -----------------------------------------------------------------------------------------------
class Counting(nn.Module):
    """Attention between layers that write to buffers."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.norm, self.dropout = nn.Linear(8, 24), nn.BatchNorm1d(8), dropout
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        q, k, v = self.qkv(self.norm(x.flatten(0, 1)).view_as(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1)
        return F.dropout(weights @ v, self.dropout, self.training).square().mean()


def buffers_after(verify, dropout, random="position"):
    """Two calls: loss, gradients, buffers, and what was said."""
    model = Counting(dropout)
    with Heard() as heard:
        call = compiled(model, verify=verify, random=random)
        torch.manual_seed(3)
        for _ in range(2):
            found = run(call, model, {"x": torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))})
    return [*found, *model.buffers(), torch.get_rng_state()], heard.said


def nothing_else_changes():
    verified, said = buffers_after(True, 0.0)
    plain, silent = buffers_after(False, 0.0)
    random, compared = buffers_after(True, 0.5)
    unverified, _ = buffers_after(False, 0.5)
    by_stream, warned = buffers_after(True, 0.5, "torch")
    unverified_stream, _ = buffers_after(False, 0.5, "torch")
    assert "values agree" in compared[0] and len(compared) == 1
    assert "values agree" in said[0] and len(said) == 1 and not silent
    assert "draws random numbers (dropout)" in warned[0] and "model.eval()" in warned[0]
    pairs = (verified, plain), (random, unverified), (by_stream, unverified_stream)
    return [all(map(torch.equal, *pair)) for pair in pairs]


@pytest.mark.zoo
@pytest.mark.parametrize("p", (1, 2))
def test_buffers_and_generators_are_those_of_one_call(ranks, p):
    assert ranks(p, nothing_else_changes) == [[True, True, True]] * p


class Drawing(nn.Module):
    """Causal attention, called or spelled out; its weights are dropped, or what comes of it, and other things."""

    def __init__(self, spelled=False, weights=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.spelled, self.weights = nn.Linear(8, 24), nn.Linear(8, 8), spelled, weights

    def forward(self, x):
        q, k, v = (y.unsqueeze(1) for y in self.qkv(F.dropout(x, 0.2)).chunk(3, -1))
        if self.spelled:
            later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            weights = (q @ k.mT / 8**0.5).masked_fill(later, -math.inf).softmax(-1)
            y = F.dropout(weights, self.weights) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.weights)
        return F.dropout(self.out(y.squeeze(1)), 0.3) + torch.rand_like(x) + torch.bernoulli(torch.rand_like(x))


def drawing(spelled, weights=0.0, fault=False):
    """What is said where the pattern of attention is taken for another, or not."""
    right = ClassifyMask.run

    def wrong(step, gm, context):
        right(step, gm, context)
        for node in gm.graph.find_nodes(op="call_function", target=operators.attention.default):
            OpCall.of(node).replace(pattern="full").write(node)

    ClassifyMask.run = wrong if fault else right
    try:
        with Heard() as heard:
            call = compiled(Drawing(spelled, weights))
            for n in (12, 17, 21, 30):  # the second graph serves three of them
                call(torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)).requires_grad_())
    except VerificationError as error:
        return str(error), heard.said
    finally:
        ClassifyMask.run = right
    return "", heard.said


@pytest.mark.sample(2)
@pytest.mark.parametrize("spelled", (False, True))
def test_attention_that_was_read_wrongly_is_told_where_the_program_draws(ranks, spelled):
    for error, said in ranks(2, drawing, spelled, 0.0, True):
        assert "output 0" in error and not said
    for error, said in ranks(2, drawing, spelled):
        assert not error and len(said) == 2 and all("values agree" in each for each in said), said


@pytest.mark.zoo
@pytest.mark.parametrize("spelled", (False, True))
def test_where_weights_are_dropped_what_found_attention_is_not_compared(ranks, spelled):
    """And that is said, once a graph."""
    for error, said in ranks(2, drawing, spelled, 0.2):
        assert not error and len(said) == 4
        assert all("drops weights" in each and "not compared" in each for each in said[::2])
        assert all("values agree" in each for each in said[1::2])


class Decaying(nn.Module):
    """A recurrence between two draws."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        states = [F.dropout(x, 0.2)[:, 0]]
        for token in F.dropout(x, 0.3).unbind(1):
            states.append(states[-1] * self.gate(token).sigmoid() + token)
        return torch.stack(states, 1) + torch.rand_like(states[0])[:, None]


def decaying():
    with Heard() as heard:
        compiled(Decaying())(torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(1)).requires_grad_())
    return heard.said


@pytest.mark.zoo
def test_a_recurrence_beside_draws_has_its_own_reason(ranks):
    for said in ranks(2, decaying):
        assert "its recurrences are scans" in said[0] and "not compared" in said[0], said
        assert len(said) == 2 and "values agree" in said[1], said


class OfFunc(nn.Module):
    """Attention of what torch.func computes, which forbids hooks on what autograd saves."""

    def forward(self, x):
        slope = torch.func.vmap(torch.func.grad(lambda row: row.sin().square().sum()))(x)
        return F.scaled_dot_product_attention(x[:, None], slope[:, None], x[:, None], is_causal=True)


SAMPLE = ("checkpointed", "lazy", "rows", "autocast", "torch.func")


def every_way(names=()):
    """How many graphs agreed, of each way to run a program, or of those with these names."""
    found = {}
    x, labels = rows_and_labels()
    rows = [ringopt.from_rows(ringopt.shard(t, 1), 1) for t in (x, labels)]
    with_grad = x.clone().requires_grad_() * 1.0  # not a leaf
    ways = {
        "plain": (Model(), (x, labels), {}),
        "an input that is no leaf": (Model(), (with_grad, labels), {}),
        "checkpointed": (Blocks("nested"), (data(13, torch.float32),), {}),
        "local": (Model(), (x, labels), {"outputs": "local"}),
        "lazy": (Model(), (x, labels), {"outputs": "lazy"}),
        "rows": (Model(), rows, {"inputs": "local", "outputs": "local"}),
        "left to a wrapper": (Model(), (x, labels), {"sync_gradients": False}),
        "three graphs": (Model(breaks=True), (x, labels), {}),
        "attention alone": (Model(), (x, labels), {"shard": "attention"}),
        "torch.func": (OfFunc(), (data(13, torch.float32),), {}),
    }
    for name, (model, inputs, options) in ways.items():
        if names and name not in names:
            continue
        with Heard() as heard:
            compiled(model, **options)(*inputs)
        found[name] = heard.agreed
    contexts = {"autocast": torch.autocast("cpu", torch.bfloat16), "inference": torch.inference_mode()}
    for name, around in contexts.items():
        if names and name not in names:
            continue
        with Heard() as heard, around:
            compiled(Blocks("not"))(data(13, torch.float32))
        found[name] = heard.agreed
    with Heard() as heard:
        call = compiled(Blocks("not"))
        for n in (12, 17, 21, 30):
            call(data(n, torch.float32))
    found["lengths"] = heard.agreed
    return found


def test_once_a_graph(ranks):
    for found in ranks(2, every_way, SAMPLE):
        assert found == {**dict.fromkeys(SAMPLE, 1), "lengths": 2}


@pytest.mark.zoo
def test_once_a_graph_however_it_is_run(ranks):
    for found in ranks(2, every_way):
        assert found.pop("three graphs") == 3 and found.pop("lengths") == 2
        assert found == dict.fromkeys(found, 1)


# ---- where something is wrong ----------------------------------------------------------------------------------------
def with_fault(which, rank, verify=True):
    """What a call raises when the sums over ranks are wrong on `rank`."""
    right, x = ProcessMesh._all_reduce, data(13, torch.float32)

    def wrong(mesh, value, label):
        total = right(mesh, value, label)
        faulty = mesh.rank == rank and (label == "gradients") == (which == "gradients")
        return total + 1e-2 * total.abs().max() if faulty else total

    ProcessMesh._all_reduce = wrong
    model = Blocks("not")
    call, said = compiled(model, inner_backend="eager", verify=verify), []
    try:
        for _ in range(2):  # who goes on after the error gets it again
            try:
                call(x)
            except VerificationError as error:
                said.append(str(error))
    finally:
        ProcessMesh._all_reduce = right
    return said, [p.grad for p in model.parameters() if p.grad is not None]


def test_a_wrong_output_is_told_on_every_rank(ranks):
    (said, gradients), (other, _) = ranks(2, with_fault, "sums", 1)
    assert said == other and said[0] == said[1] and not gradients
    assert "output 0 (" in said[0] and "by 1.0e-02 of its largest element on rank 1 (allowed: 1e-04)" in said[0]
    assert "of 43 values differ from those of the original program" in said[0]


def test_wrong_gradients_are_told_by_name(ranks):
    (said, _), (other, _) = ranks(2, with_fault, "gradients", 0)
    assert said == other and "the gradient of " in said[0] and "_weight by " in said[0] and "on rank 0" in said[0]
    assert "output 0" not in said[0]


@pytest.mark.zoo
def test_nothing_is_compared_unless_it_is_asked_for(ranks):
    assert [said for said, _ in ranks(2, with_fault, "sums", 1, False)] == [[], []]


def test_what_rounding_moves_is_no_error():
    """Of a sum that cancels, rounding is all that is left; and yet an error in front of it is found."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(0))

    def program(a, b):
        return (((a * 3e4).sum() - (b * 3e4).sum()),)

    graph = torch.fx.symbolic_trace(program)
    for node, value in zip(graph.graph.nodes, (x, x.flip(0)), strict=False):
        node.meta["example_value"] = value
    alone = mesh_of("pretend:0/1")
    for off, wrong in ((1e-7, False), (1e-2, True)):
        run = Verified(lambda a, b, off=off: program(a * (1 + off), b), Original(graph, "ab"), alone, {}, ())
        with pytest.raises(VerificationError, match="output 0") if wrong else nullcontext():
            run(x, x.flip(0))


@pytest.mark.parametrize("side", ("ranks", "original", "both"))
def test_nan_on_one_side_is_a_difference(side):
    x = torch.rand(8, generator=torch.Generator().manual_seed(0))

    def program(a):
        return (a.log(),)

    graph = torch.fx.symbolic_trace(program)
    next(iter(graph.graph.nodes)).meta["example_value"] = x
    given = x if side == "ranks" else torch.cat([x[:-1], -x[-1:]])  # the logarithm of a negative number is NaN
    sharded = {"ranks": lambda a: (a.log() * math.nan,), "original": lambda a: (a.abs().log(),), "both": program}[side]
    run = Verified(sharded, Original(graph, "a"), mesh_of("pretend:0/1"), {}, ())
    with nullcontext() if side == "both" else pytest.raises(VerificationError, match="output 0"):
        run(given)


def test_files_are_verified_by_the_command():
    exported = torch.export.export(Blocks("not"), (data(13, torch.float32),))
    with pytest.raises(ProgramError, match="ringopt convert --verify"):
        ringopt.convert(exported, {"verify": True})
