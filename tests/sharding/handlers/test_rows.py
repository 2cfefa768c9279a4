"""Rows picked and moved along the sequence: right in value and gradient, and nothing is gathered but the output."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from ringopt import record_traffic
from ringopt.calls import OpCall
from ringopt.drivers.compile import transform
from ringopt.ir.nodes import op_name
from ringopt.options import Options
from ringopt.tools.benchmarks.models.recurrent_layers import CHUNK, DIM, layer_of
from tests.harness.threads import run_on_threads
from tests.harness.translation import Seat, captured, validate
from tests.sharding.programs import B, D, H, Model, case, check, inputs

T = lambda x: x.transpose(1, 2)  # noqa: E731

STEPS = {
    "first row": lambda m, x: x + x[:, 0][:, None],
    "first row, kept": lambda m, x: x + x[:, :1],
    "last row": lambda m, x: x + x[:, -1:],
    "row of the flattened": lambda m, x: x + x.reshape(-1, D)[13],
    "row behind heads": lambda m, x: x + x.view(*x.shape[:2], H, -1).transpose(1, 2)[:, :, 4].reshape(-1, 1, D),
    "a boolean row": lambda m, x: x * (x > 0)[:, 2:3],
    "two rows": lambda m, x: x + x[:, 2:4].sum(1, keepdim=True),
    "every second row": lambda m, x: x + F.pad(m.linear(x[:, ::2]), (0, 0, 0, x.shape[1] // 2)),
    "but the first": lambda m, x: F.pad(m.linear(x[:, 1:]), (0, 0, 1, 0)),
    "but the last": lambda m, x: F.pad(m.linear(x[:, :-1]), (0, 0, 0, 1)),
    "narrowed": lambda m, x: F.pad(x.narrow(1, 2, 8), (0, 0, 2, x.shape[1] - 10)),
    "middle": lambda m, x: F.pad(x[:, 2:-1], (0, 0, 1, 2)),
    "shift by a pad that cuts": lambda m, x: F.pad(x, (0, 0, 2, -2)),
    "rows of both ends": lambda m, x: x + F.pad(x[:, 1:] - x[:, :-1], (0, 0, 0, 1)),
    "circular": lambda m, x: T(F.pad(T(x), (2, 1), "circular"))[:, 1:-2],
    "replicated ends": lambda m, x: T(F.pad(T(x), (3, 1), "replicate"))[:, 3:-1],
    "reflected ends": lambda m, x: T(F.pad(T(x), (3, 1), "reflect"))[:, 1:-3],
    "split": lambda m, x: F.pad(x.split((2, 8, x.shape[1] - 10), 1)[1], (0, 0, 0, x.shape[1] - 8)),
    "roll": lambda m, x: m.linear(x.roll(1, 1)),
    "roll back": lambda m, x: m.linear(x.roll(-4, 1)),
    "roll of channels, too": lambda m, x: m.linear(x.roll((1, 2, -3), (1, 2, 1))),
    "flip": lambda m, x: m.linear(x.flip(1)),
    "flip of channels, too": lambda m, x: m.linear(x.flip((1, 2))),
    "padded by a number": lambda m, x: F.pad(x, (0, 0, 1, -1), value=2.0),
    "row before the first of the flattened": lambda m, x: x + F.pad(x.reshape(-1, D)[1:], (0, 0, 1, 0)).view(x.shape),
    "repeated": lambda m, x: m.linear(x.repeat(1, 2, 1))[:, 3:-10],
    "tiled": lambda m, x: m.linear(x.tile((2, 1)))[:, 3:-10],
    "each row twice": lambda m, x: m.linear(x.repeat_interleave(2, 1))[:, 3:-10],
    "linear over the sequence": lambda m, x: T(F.linear(T(x), m.vector[0].expand(13, 13), m.vector[:1].expand(13))) + x,
    "diff": lambda m, x: F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "diff of booleans": lambda m, x: x * F.pad((x > 0).diff(dim=1), (0, 0, 1, 0)),
    "relative shift by slice": lambda m, x: x + F.pad(x[:, 1:] * x[:, :-1], (0, 0, 1, 0)),
}


def delta_rule_in_chunks(m, x):
    """Gated DeltaNet's chunks (Yang et al. 2025), of four tokens: solved by themselves, then a state goes through."""
    keys, given = F.pad(x, (0, 0, 0, 3)).view(B, 4, 4, D), F.pad(m.linear(x), (0, 0, 0, 3)).view(B, 4, 4, D)
    new = torch.linalg.solve_triangular((keys @ keys.mT).sigmoid(), given, upper=False, unitriangular=True)
    state, out = x.new_zeros(B, D, D), torch.zeros_like(new)
    for i in range(4):
        rest = new[:, i] - keys[:, i] @ state
        out[:, i] = rest + x.new_ones(4, 4).tril() @ rest
        state = 0.5 * state + keys[:, i].mT @ rest
    return out.reshape(B, 16, D)[:, : x.shape[1]]


STEPS["delta rule in chunks"] = delta_rule_in_chunks

ENDS = {
    "first token": lambda m, x: m.linear(x[:, 0]),
    "last token": lambda m, x: m.linear(x)[:, -1],
    "logits of the last five": lambda m, x: m.linear(x[:, -5:]).sum(),
    "last unpadded token": lambda m, x: m.linear(x)[torch.arange(x.shape[0]), torch.tensor([4, -1])],
    "last positive token": lambda m, x: x[torch.arange(2), (x[..., 0].detach() > 0).long().cumsum(1).argmax(1)],
    "rows by number": lambda m, x: x.index_select(1, torch.tensor([3, 3, 0])).sum(),
    "one index for batch and row": lambda m, x: (lambda i: x[i, i])(torch.arange(2)),
    "last token by gather": lambda m, x: x.gather(1, torch.tensor([4, -1]).clamp(0).view(-1, 1, 1).expand(-1, 1, D)),
    "rows taken along": lambda m, x: torch.take_along_dim(m.linear(x), torch.tensor([[4], [12]])[..., None], 1),
    "one row by number": lambda m, x: x[:, torch.tensor(5)],
    "next token": lambda m, x: F.mse_loss(m.linear(x)[:, :-1], x[:, 1:].detach()),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    p, layout = case(STEPS, name)
    verdict = check(STEPS[name], p=p, layout=layout, n=13)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("name", ENDS)
def test_ends(name, layout):
    verdict = check(end=ENDS[name], p=3, n=13, layout=layout)
    assert verdict.report.gathers == ()


def in_windows(m, x):
    """Five windows of four rows, as capitals, which mean what small letters do."""
    at = x.view(x.shape[0], 5, 4, D)
    weights = torch.einsum("BNKD,BNXD->BNKX", m.linear(at), at).sigmoid()
    return torch.einsum("BNKX,BNXD->BNKD", weights, at).reshape(x.shape)


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_windows_are_spread_whole_although_one_rank_has_more_of_them(layout):
    verdict = check(in_windows, p=2, n=20, layout=layout)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.parametrize(
    "step, op",
    [
        (lambda m, x: F.pad(x, (1, -1, 1, -1), value=2.0), "pad"),
        (lambda m, x: x.roll(3), "roll"),
        (lambda m, x: x + x.narrow(1, torch.tensor(3), 1), "narrow"),
    ],
)
def test_what_is_not_known_is_gathered(step, op):
    verdict = check(step, p=3)
    assert [gather.op for gather in verdict.report.gathers] == [op, "output"]


def sent_by_rank_1(module, n, layout):
    """Bytes by label that rank 1 of 3 sends in the forward: as many as the report says, but for the handshake that
    begins a mesh."""
    gm, given = captured(module.double(), *inputs(n))
    made = [transform(gm, given, Options(layout=layout), Seat(rank, 3)) for rank in range(3)]
    with record_traffic() as traffic, torch.no_grad():
        run_on_threads(3, lambda mesh: made[mesh.rank].graph(*given))
    found = Counter()
    for event in traffic.of(1).events:
        found[event.label] += event.bytes
    assert made[1].report.bytes_sent == found.total() - found["handshake"]
    return found


def traffic_of(step, n, layout):
    """Bytes of rows that a step sends."""
    return sent_by_rank_1(Model(step), n, layout)["fetch_rows"]


@pytest.mark.parametrize("layout, chunks", [("contiguous", 1), ("zigzag", 2)])
def test_a_shift_sends_a_row_a_chunk(layout, chunks):
    row = 2 * D * 8
    assert traffic_of(lambda m, x: F.pad(x, (0, 0, 1, -1)), 48, layout) == chunks * row


def test_a_picked_row_is_all_that_travels():
    row = 2 * D * 8
    assert traffic_of(lambda m, x: x + x[:, 20:21], 48, "contiguous") == 2 * row
    assert traffic_of(lambda m, x: x + x[:, :1], 48, "contiguous") == 0  # they are rank 0's


def test_shifted_logits_stay_where_they_are():
    """Of the logits of n tokens, the loss over n - 1 of them moves one a chunk at most."""
    row = 2 * D * 8
    sent = traffic_of(lambda m, x: x * F.mse_loss(x[:, :-1], torch.ones_like(x)[:, 1:]), 48, "zigzag")
    assert sent <= 2 * row


@pytest.mark.parametrize("ranks, tokens", [(2, 512), (3, 450)])
def test_what_a_convolution_adds_behind_the_end_is_sent_to_nobody(ranks, tokens):
    """Where ranks hold whole chunks, the tokens that are left are where they were: each rank slices its own."""
    layer, x = layer_of("gated delta net", 1).double(), torch.randn(1, tokens, DIM, dtype=torch.float64)
    verdict = validate(ranks, layer, x.requires_grad_())
    assert verdict.wrong == "" and verdict.report.sites[0].layout == "contiguous"
    forms = [OpCall.of(node)["form"] for node in verdict.graph.graph.nodes if op_name(node) == "fetch_rows"]
    assert forms[0] == "edges" and ("move" in forms) == bool(tokens % CHUNK)


def test_rows_made_more_of_all_elements_are_gathered():
    verdict = check(lambda m, x: x + x.repeat_interleave(2).view(B, -1, D)[:, : x.shape[1]], p=2)
    assert [gather.op for gather in verdict.report.gathers] == ["repeat_interleave", "output"]
