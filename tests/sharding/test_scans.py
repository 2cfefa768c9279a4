"""A scan in a program is a site: what it reads and gives is spread by steps, and nothing of it is gathered."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.ops import operators as ops
from ringopt.sharding.grains import grains_of
from tests.harness.translation import Verdict, validate
from tests.scans.bodies import Scan, drawn

WIDTH, HEADS = 8, 2


def text_of_diagonal() -> str:
    """[B, D] carried; a gate and an addend for each token, and a weight for all."""

    def step(s: Tensor, a: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = a * s + x
        return s, s * w

    return Scan(step, [drawn(2, WIDTH)], [drawn(1, 2, WIDTH)] * 2, [drawn(WIDTH)]).text


def text_of_chunks(c: int) -> str:
    """[B, H, K, V] carried, over chunks of `c` tokens."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        new = v - k @ s
        return s * g[..., None, None] + k.mT @ new, q @ s + (q @ k.mT).tril() @ new

    rows = drawn(1, 2, HEADS, c, WIDTH // HEADS)
    state = drawn(2, HEADS, WIDTH // HEADS, WIDTH // HEADS)
    return Scan(step, [state], [rows, rows, rows, drawn(1, 2, HEADS)], []).text


class Tokens(nn.Module):
    """A recurrence over tokens; `attends`: behind attention."""

    def __init__(self, attends: bool = False, last: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.attends, self.last, self.text = attends, last, text_of_diagonal()
        self.proj, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 3)
        self.start, self.weight = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        q, k, a, v = self.proj(x).chunk(4, -1)
        if self.attends:
            heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
            v = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        gate = 0.9 + 0.1 * torch.sigmoid(a)
        last, y = ops.scan([self.start], [gate.transpose(0, 1), v.transpose(0, 1)], [self.weight], self.text)
        scores = self.out(y.transpose(0, 1) + x)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return (loss + last.square().sum(), scores, last) if self.last else (loss, scores)


class Chunks(nn.Module):
    """A gated delta rule over chunks of `c` tokens, the chunks made by a reshape, the last filled up by `padded`.
    `pairs`: with products of the tokens of a chunk beside the scan."""

    def __init__(self, c: int, padded: int = 0, pairs: bool = False):
        super().__init__()
        self.pairs = pairs
        torch.manual_seed(0)
        self.c, self.text, self.padded = c, text_of_chunks(c), padded
        self.proj, self.gate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        def chunks(t: Tensor) -> Tensor:
            t = t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return F.pad(t, (0, 0, 0, self.padded)).unflatten(2, (-1, self.c)).movedim(2, 0)

        q, k, v = (chunks(t) for t in self.proj(x).chunk(3, -1))
        gate = F.pad(0.9 + 0.1 * torch.sigmoid(self.gate(x)).transpose(1, 2), (0, self.padded))
        gate = gate.unflatten(2, (-1, self.c)).mean(-1).movedim(2, 0)
        start = x.new_zeros(x.shape[0], HEADS, WIDTH // HEADS, WIDTH // HEADS)
        _last, y = ops.scan([start], [q, F.normalize(k, dim=-1) * 0.5, v, gate], [], self.text)
        y = y + (q @ k.mT).tril() @ v if self.pairs else y
        y = y.movedim(0, 2).flatten(2, 3)[:, :, : x.shape[1]].transpose(1, 2).flatten(2)
        scores = self.out(y + x)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


def data(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, n, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    return x, torch.randint(3, (2, n), generator=generator)


def checked(p: int, module: nn.Module, n: int, **options: Any) -> Verdict:
    verdict = validate(p, module, *data(n), **options)
    assert verdict.wrong == ""
    return verdict


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_a_model_of_scans_alone_is_sharded(p, layout, last):
    verdict = checked(p, Tokens(last=last), 13, layout=layout)
    (site,) = verdict.report.sites
    assert (site.form, site.pattern, site.strategy, site.layout) == ("scan", "13 steps", "states", layout)
    assert site.refusal is None
    assert verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [2, 4])
def test_beside_attention_it_has_the_layout_of_that(p):
    verdict = checked(p, Tokens(attends=True), 17)
    attention, scan = verdict.report.sites
    assert attention.layout == scan.layout == "zigzag"
    assert "sharded_scan" in str(verdict.graph.graph) and verdict.report.sharded_fraction > 0.9


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_bytes_in_the_report_do_not_grow(layout):
    sent = {checked(2, Tokens(), n, layout=layout).report.sites[0].bytes_sent for n in (12, 24)}
    state = matrix = 2 * WIDTH
    assert sent == {8 * (2 * (matrix + state) if layout == "zigzag" else state)}  # of two segments none is between


@pytest.mark.sample(3)
@pytest.mark.parametrize("p, n, c", [(2, 16, 2), (2, 20, 4), (3, 24, 2)])
def test_steps_of_several_tokens(p, n, c):
    verdict = checked(p, Chunks(c), n)
    assert verdict.report.sites[0].strategy == "states"
    assert verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("p", [2, 3])
def test_ranks_hold_whole_chunks(p, padded, layout):
    """Also where the last chunk is filled up: nothing is sent to make chunks of rows, or rows of chunks."""
    verdict = checked(p, Chunks(4, padded), 32 - padded, layout=layout)
    assert verdict.report.sites[0].strategy == "states" and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    text = str(verdict.graph.graph)
    assert (f"{layout}:4x8" in text) == bool(padded) and "respread" not in text


class Before(nn.Module):
    """Chunks of 4 tokens read the state before them, so that the last chunk updates none (gated linear attention)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH).double(), nn.Linear(WIDTH, 3).double()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        q, k, v = (t.unflatten(1, (-1, 4)) for t in self.qkv(x).chunk(3, -1))
        new, states = k.mT @ v, [x.new_zeros(x.shape[0], WIDTH, WIDTH)]
        for i in range(new.shape[1]):
            states.append(0.9 * states[-1] + new[:, i])
        y = q @ torch.stack(states[:-1], 1) + (q @ k.mT).tril() @ v
        scores = self.out(y.flatten(1, 2))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores


@pytest.mark.parametrize("p, chunks, layout", [(2, 5, "zigzag"), (2, 6, "contiguous"), (3, 8, "zigzag")])
def test_a_step_fewer_than_there_are_chunks(p, chunks, layout):
    verdict = checked(p, Before(), 4 * chunks, layout=layout)
    assert verdict.report.sites[0].strategy == "states" and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert f"{layout}:1x{chunks}" in str(verdict.graph.graph)


def test_pairs_inside_of_chunks_stay_with_their_chunk():
    verdict = checked(2, Chunks(8, pairs=True), 64)
    assert verdict.report.sharded_fraction == 1.0 and not any("no site" in note for note in verdict.report.notes)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_chunks_of_two_sizes_end_together():
    found = [(64, 6), (16, 24), (16, 24), (48, 8)]
    with patch("ringopt.sharding.grains.chunks_of", lambda pair: [pair]):
        assert grains_of(found, 4) == ((64, 6), (4, 6))
        assert grains_of(found, 7) == ((48, 8), (3, 8))
        # 7 chunks of 64 are as long as 24 of 16 and one of 64 more: another sequence, which has its own.
        assert grains_of([(64, 7), (16, 24)], 4) == ((64, 7), (16, 24))


class Both(nn.Module):
    """Attention, which is best on a zigzag, and a recurrence over chunks of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tokens(attends=True), Chunks(8, pairs=True)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        loss, scores = self.first(x, labels)
        again, other = self.second(x + scores.sum(-1, keepdim=True), labels)
        return loss + again, scores + other


@pytest.mark.parametrize("p, n", [(2, 24), pytest.param(3, 32, marks=pytest.mark.zoo)])
def test_fewer_chunks_than_segments_lie_one_after_the_other(p, n):
    """2 ranks of a zigzag have 4 segments, and 24 tokens have 3 chunks of 8."""
    verdict = checked(p, Both(), n)
    attention, tokens, chunks = verdict.report.sites
    assert {site.layout.partition(":")[0] for site in verdict.report.sites} == {"contiguous"}
    assert tokens.strategy == chunks.strategy == "states" and attention.refusal is None
    assert verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_a_layout_that_options_name_stays():
    verdict = checked(2, Chunks(8), 24, layout="zigzag")
    assert re.search("3 steps for 2 ranks", verdict.report.sites[0].refusal)


def test_fewer_steps_than_ranks_are_computed_by_all():
    verdict = checked(4, Chunks(8), 16)
    (site,) = verdict.report.sites
    assert re.search("2 steps for 4 ranks", site.refusal)


def test_a_step_that_is_not_affine_runs_rank_by_rank_where_its_batch_cannot_be_shared():
    module = Tokens(attends=True)
    step = lambda s, a, x, w: ((s := torch.tanh(a * s + x)), s * w)  # noqa: E731
    module.text = Scan(step, [drawn(2, WIDTH)], [drawn(1, 2, WIDTH)] * 2, [drawn(WIDTH)]).text
    verdict = checked(3, module, 13)
    assert [site.refusal for site in verdict.report.sites] == [None, None]
    assert "tanh of what a step carries; by heads it is not shared: " in str(verdict.report.sites[1].notes)


def test_the_report_names_what_is_carried():
    text = checked(2, Tokens(), 12).report.text(verbose=True)
    assert "0 attention sites and 1 scan on 2 ranks" in text
    assert "[2, 8] (point, point)" in text
