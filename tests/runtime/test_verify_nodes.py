"""`verify="nodes"`: every node of the sharded graph against the node of the program that it is."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.context_parallel.executor.tiles import TileScores
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.drivers.compile import transform
from ringopt.errors import OptionError, VerificationError
from ringopt.ir.nodes import readable_name, tensor_args
from ringopt.options import Options
from ringopt.runtime.verify import Original, Verified
from ringopt.runtime.verify_nodes import NodeCheck
from ringopt.sharding.handlers import registry
from tests.harness.models import build
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.harness.translation import Seat, captured


class Mixer(nn.Module):
    """Causal attention between two layers, a sum over all tokens, and their running mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        y = self.out(y).cumsum(1).tanh()
        return y * y.sum(1, keepdim=True)


class Unread(Mixer):
    """Of what is computed of all tokens nothing is left."""

    def forward(self, x):
        y = super().forward(x)
        return y + 0 * y.cumsum(1)


def checked(module, *inputs, p=2, run=None, grad=True, **options):
    """Every rank's first call; `run` takes the place of what is compiled."""
    keywords = inputs[-1] if inputs and isinstance(inputs[-1], dict) else {}
    gm, given = captured(module, *inputs[: len(inputs) - bool(keywords)], **keywords)
    names = [readable_name(node.name) for node in gm.graph.find_nodes(op="placeholder")]
    chosen = Options(verify="nodes", inner_backend="eager", **options)
    made = [transform(gm, given, chosen, Seat(rank, p)) for rank in range(p)]

    def body(mesh):
        one = made[mesh.rank]
        original = Original(gm, names)
        if one.drawn:
            original.drawn_by_position(one.pairs.whole, "")
        check = NodeCheck(one.pairs, mesh, {**one.left, **one.local}, one.averaged, frozenset(one.given))
        with torch.set_grad_enabled(grad):
            return Verified(run or one.graph, original, mesh, one.local, one.averaged, check)(*given)

    return run_on_threads(p, body)


def agreed(caplog):
    """How many values and gradients of nodes each rank has found to agree."""
    said = [record.getMessage() for record in caplog.records]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], said
    return [int(each.split()[1]) for each in said if "gradients of nodes agree" in each]


DATA = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


# ---- where all is well -----------------------------------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"sync_gradients": False}, {"layout": "zigzag"}], ids=str)
def test_every_node_of_a_layer_agrees_in_value_and_gradient(caplog, options):
    with caplog.at_level("INFO", "ringopt.runtime.verify"):
        checked(Mixer(), DATA.clone().requires_grad_(), p=3, **options)
    assert [number > 25 for number in agreed(caplog)] == [True] * 3


def test_a_language_model_agrees(caplog):
    """All that is not of the mask: repeated heads and masks are gone, each rank's part of a sum is nobody's."""
    model, inputs = build("llama", 24)
    with caplog.at_level("INFO", "ringopt.runtime.verify"):
        checked(model, inputs)
    assert all(number > 300 for number in agreed(caplog)) and len(agreed(caplog)) == 2


class Counting(Mixer):
    """Beside its output it returns what has no gradient: a tensor, and a number."""

    def forward(self, x):
        y = super().forward(x)
        return y, y.detach().argmax(-1), x.size(1)


def test_an_output_without_a_gradient_takes_no_part_in_the_backward(caplog):
    with caplog.at_level("INFO", "ringopt.runtime.verify"):
        checked(Counting(), DATA.clone().requires_grad_())
    assert [number > 25 for number in agreed(caplog)] == [True] * 2


def test_without_gradients_values_are_compared(caplog):
    with caplog.at_level("INFO", "ringopt.runtime.verify"):
        checked(Mixer(), DATA, grad=False)
    found = agreed(caplog)
    assert len(found) == 2 and 12 < found[0] < 35


# ---- where something is wrong ----------------------------------------------------------------------------------------
def each_rank_its_own(sharder, node):
    """A wrong rule: a running sum of the rows that a rank has."""
    [operand] = tensor_args(node)
    at = sharder.placements[operand]
    args = (sharder.values[operand], *node.args[1:])
    sharder.set(node, sharder.call(node.target, args, node, at), at)
    return True


def test_a_wrong_sharding_rule_is_found_to_the_node(monkeypatch):
    monkeypatch.setitem(registry.HANDLERS, "cumsum", each_rank_its_own)
    with pytest.raises(VerificationError) as error:
        checked(Mixer(), DATA.clone().requires_grad_())
    assert "The first node that differs: %cumsum = cumsum (" in str(error.value)
    assert "y = self.out(y).cumsum(1).tanh()), placed S(1), by " in str(error.value)
    assert "on rank 1 (allowed: 1e-04)" in str(error.value)


def test_a_wrong_block_of_a_mask_is_found_to_the_attention(monkeypatch):
    right = TileScores.tiles

    def seeing_all(self, block):
        return right(self, replace(block, kind=Kind.FULL) if block.kind is Kind.CAUSAL else block)

    monkeypatch.setattr(TileScores, "tiles", seeing_all)
    said = r"first node that differs: %attention = ring_attention .*placed S\(2\)"
    with pytest.raises(VerificationError, match=said):
        checked(Mixer(), DATA.clone().requires_grad_())


@pytest.mark.parametrize("dropped", ["forward", "backward"])
def test_a_dropped_all_reduce_is_found_to_the_node(monkeypatch, dropped):
    """Of a sum over all tokens, or of the gradients of parameters."""
    right, labels = ThreadMesh._all_reduce, []

    def alone(mesh, x, label):
        labels.append(label)
        total = right(mesh, x, label)
        return x.clone() if (label == "gradients") == (dropped == "backward") else total

    monkeypatch.setattr(ThreadMesh, "_all_reduce", alone)
    said = "%sum_1 = " if dropped == "forward" else "the gradient of %"
    with pytest.raises(VerificationError, match=rf"first node that differs: {said}.*on every rank, by "):
        checked(Mixer(), DATA.clone().requires_grad_())


def test_where_all_nodes_agree_the_compiler_below_is_named():
    gm, _ = captured(Mixer(), DATA)
    with pytest.raises(VerificationError, match=r"values and gradients of nodes agree .* \(option inner_backend\)"):
        checked(Mixer(), DATA, run=lambda *inputs: tuple(1.01 * out for out in gm(*inputs)))


def test_what_nobody_reads_is_a_warning(monkeypatch, caplog):
    module = Unread()
    right = registry.HANDLERS["cumsum"]

    def second(sharder, node):
        return each_rank_its_own(sharder, node) if node.name != "cumsum" else right(sharder, node)

    monkeypatch.setitem(registry.HANDLERS, "cumsum", second)
    checked(module, DATA)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and all("a node differs in what nobody reads of it: %cumsum_1 = " in each for each in said)


def test_the_option_is_named():
    with pytest.raises(OptionError, match="option verify='node': expected 'nodes' or True or False"):
        Options(verify="node")
