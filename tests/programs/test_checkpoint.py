"""Activation checkpointing: the same numbers, what was asked for is computed again, and no exchange is repeated."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringopt
from ringopt.distributed.lookup import mesh_of
from ringopt.drivers.compile import transform
from ringopt.frontend.capture import capture
from ringopt.ir.checkpoint_regions import police
from ringopt.ir.nodes import op_name
from ringopt.options import Options
from tests.harness.capturing import assert_same
from tests.harness.errors import worst_of
from tests.harness.models import build, difference, run
from tests.harness.translation import captured, validate

WIDTH, HEADS = 16, 2
aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), dropout

    def attend(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def feed(self, x):
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return self.feed(self.attend(x))


def save_products(_context, op, *_args, **_kwargs):
    kept = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_products)}


def no_contexts():
    return nullcontext(), nullcontext()


class Blocks(nn.Module):
    """Two blocks, checkpointed as `how` says."""

    def __init__(self, how, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.how = nn.ModuleList([Block(dropout), Block(dropout)]), how

    def forward(self, x):
        for block in self.blocks:
            x = self.through(block, x)
        return x.square().mean()

    def through(self, block, x):
        match self.how:
            case "not":
                return block(x)
            case "plain":
                return checkpoint(block, x, use_reentrant=False)
            case "reentrant":
                return checkpoint(block, x, use_reentrant=True)
            case "selective":
                return checkpoint(block, x, **SELECTIVE)
            case "nested":
                feed = partial(checkpoint, block.feed, use_reentrant=False)
                return checkpoint(lambda y: feed(block.attend(y)), x, use_reentrant=False)
            case "selective inside":
                feed = partial(checkpoint, block.feed, **SELECTIVE)
                return checkpoint(lambda y: feed(block.attend(y)), x, use_reentrant=False)
            case "other contexts":
                return checkpoint(block, x, use_reentrant=False, context_fn=no_contexts)


FORMS = ("plain", "reentrant", "selective", "nested", "selective inside")


def data(n=11, dtype=torch.float64):
    return torch.randn(2, n, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", FORMS)
def test_numbers(how):
    verdict = validate(2 + FORMS.index(how) % 2, Blocks(how).double(), data())
    assert not verdict.wrong
    assert verdict.report.sharded_fraction == 1.0 and not verdict.report.gathers
    assert "2 checkpointed regions: computed again in the backward, but for 2 exchanges" in verdict.report.notes[0]


def test_the_captured_graph_is_the_program():
    gm, given = captured(Blocks("nested").double(), data())
    made = capture(gm, given)
    flat = made.graph
    regions = {node.meta["ac_graph_id"] for node in flat.graph.nodes if "ac_graph_id" in node.meta}
    assert regions == {0, 1, 2, 3} and {region.outermost for region in made.regions.made.values()} == {0, 2}
    assert_same(flat, gm, given)


def backward_ops(gm, inputs):
    """The operators of the backward graph that AOTAutograd makes of `gm`."""
    backward = []

    def partition(*args, **kwargs):
        parts = min_cut_rematerialization_partition(*args, **kwargs)
        backward.append(parts[1])
        return parts

    police(gm)
    aot_autograd(fw_compiler=lambda graph, _inputs: graph.forward, partition_fn=partition)(gm, inputs)
    return Counter(map(op_name, backward[0].graph.nodes))


@pytest.mark.sample(4)
@pytest.mark.parametrize("how, products", [("not", 0), ("plain", 7), ("selective", 0), ("nested", 7)])
def test_the_backward_computes_again_what_torch_does(how, products):
    """But for attention: its results are kept, and no exchange is repeated. Torch 2.11 keeps two products of regions in
    regions."""
    gm, inputs = captured(Blocks(how).double(), data())
    flat = transform(gm, inputs, Options(), mesh_of("pretend:0/2")).graph
    ours, torchs = backward_ops(flat, inputs), backward_ops(gm, inputs)
    assert ours["addmm"] == products
    assert torchs["addmm"] == (5 if how == "nested" and torch.__version__ < (2, 12) else products)
    assert all(ours[name] == torchs[name] for name in ("mm", "gelu", "native_layer_norm"))
    assert ours["ring_attention"] == 0 and ours["ring_attention_backward"] == 2 and ours["gather"] == 1


# ---- on ranks ------------------------------------------------------------------------------------------------------
def bytes_kept_by(compiled, model, x):
    """What a forward keeps for its backward, parameters and input aside."""
    known, sizes = {p.data_ptr() for p in (*model.parameters(), x)}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(x)
    return sum(sizes.values())


def bytes_kept(how):
    """On one rank, and the error against one process."""
    torch._dynamo.reset()
    model, inputs = Blocks(how), {"x": data(64, torch.float32)}
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    error = difference(run(compiled, model, inputs), run(model, model, inputs))
    return bytes_kept_by(compiled, model, inputs["x"]), error


@pytest.mark.zoo
@pytest.mark.parametrize("p", (2, pytest.param(4, marks=pytest.mark.zoo)))
def test_a_block_keeps_its_input_and_its_attention(ranks, p):
    """Per rank and block: the rows that go in, and those that the exchange brought with their log-sum-exp."""
    rows, word = 2 * 64 // p, 4
    block = rows * (2 * WIDTH + HEADS) * word
    for kept, error in ranks(p, bytes_kept, "plain"):
        assert error < 1e-5
        assert 2 * block <= kept <= 2 * block + 64 * word
    assert all(kept > 5 * block for kept, _ in ranks(p, bytes_kept, "not"))


def with_dropout(how, inner_backend):
    """Two steps from one seed: outputs and gradients."""
    torch._dynamo.reset()
    model, x, found = Blocks(how, dropout=0.5), data(12, torch.float32), []  # of 6 rows, one kernel for both ranks
    if inner_backend == "inductor":  # the order in which several draw again is shown by the other
        model.blocks = model.blocks[:1]
    compiled = torch.compile(model, backend="ring", options={"inner_backend": inner_backend})
    torch.manual_seed(5)
    for _ in range(2):
        found += run(compiled, model, {"x": x})
    return found, bytes_kept_by(compiled, model, x)


@pytest.mark.parametrize("inner_backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.zoo)))
def test_dropout_drops_the_same_again(ranks, inner_backend):
    """And the cache of compiled code tells the two graphs apart, which are one text."""
    kept = ranks(2, with_dropout, "not", inner_backend, timeout=240)
    again = ranks(2, with_dropout, "plain", inner_backend, timeout=240)
    for (expected, much), (found, little) in zip(kept, again, strict=True):
        assert difference(found, expected) < 1e-5
        assert not torch.equal(found[0], found[len(found) // 2]), "another mask in the second step"
        assert little < much / 2


def around_compiled_blocks(verify):
    """Each block compiled by itself, and called in a checkpoint: the errors of two steps against one process. What is
    computed again stops in the midst of a call, by an error that cuts nothing short; what compiles and verifies saves
    nothing that the checkpoint would see."""
    torch._dynamo.reset()
    model, inputs = Blocks("plain"), {"x": data(12, torch.float32)}
    expected = run(model, model, inputs)
    for block in model.blocks:
        block.compile(backend="ring", options={"inner_backend": "aot_eager", "verify": verify})
    return [difference(run(model, model, inputs), expected) for _ in range(2)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("verify", (False, True))
def test_blocks_compiled_inside_checkpoints(ranks, verify):
    for errors in ranks(2, around_compiled_blocks, verify):
        assert worst_of(*errors) < 1e-5


def test_where_hooks_are_forbidden_blocks_are_compiled_all_the_same():
    torch._dynamo.reset()
    model, inputs = Blocks("plain"), {"x": data(12, torch.float32)}
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        found = torch.compile(model.blocks[0], backend="ring", options={"inner_backend": "eager"})(inputs["x"])
    torch.testing.assert_close(found, model.blocks[0](inputs["x"]))


# ---- whole models, refusals ----------------------------------------------------------------------------------------
@pytest.mark.zoo
def test_llama_with_gradient_checkpointing():
    model, inputs = build("llama", 21, torch.float64)
    model.model.gradient_checkpointing_enable()
    verdict = validate(3, model, inputs)
    assert not verdict.wrong
    assert [site.refusal for site in verdict.report.sites] == [None, None]
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert verdict.report.notes[0].startswith("2 checkpointed regions")


def test_other_contexts_are_refused():
    report = ringopt.explain(Blocks("other contexts"), data(dtype=torch.float32), world_size=2)
    assert "a context other than those of create_selective_checkpoint_contexts: nullcontext" in report.refusal


def test_eager_computes_nothing_again_and_says_so():
    report = ringopt.explain(
        Blocks("plain"), data(dtype=torch.float32), world_size=2, options={"inner_backend": "eager"}
    )
    assert "nothing is computed again, for inner_backend='eager'" in report.notes[0]


def lengths_in_turn():
    torch._dynamo.reset()
    model, worst, before = Blocks("nested"), 0.0, len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for n in (12, 17, 21):
        inputs = {"x": data(n, torch.float32)}
        worst = worst_of(worst, difference(run(compiled, model, inputs), run(model, model, inputs)))
    return worst, len(ringopt.reports()) - before


@pytest.mark.zoo
def test_lengths_in_turn_compile_twice(ranks):
    assert all(error < 1e-5 and graphs == 2 for error, graphs in ranks(2, lengths_in_turn))
