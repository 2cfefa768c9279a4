"""Attention whose K and V are made of few numbers a token: these travel, and the numbers and all gradients are those of
the program."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringopt
from ringopt.distributed.traffic import record_traffic
from ringopt.ir.nodes import op_name
from tests.harness.lengths import run_over
from tests.harness.models import difference
from tests.harness.translation import Verdict, validate_module

B, N, WIDTH, HEADS = 2, 13, 12, 4
LATENT, NOPE, ROPE, VALUE = 5, 6, 4, 3


class Tiny(nn.Module):
    """K and V are linear in a latent."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.up = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, LATENT), nn.Linear(LATENT, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, HEADS, 8).transpose(1, 2)
        k, v = (t.view(b, n, HEADS, 8).transpose(1, 2) for t in self.up(self.down(x)).chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Latent(nn.Module):
    """As DeepSeek-V2 has it: a normalised latent, expanded to heads, and rotated keys that all heads share."""

    def __init__(self, mask: str = "causal", dropout: float = 0.0) -> None:
        super().__init__()
        self.mask, self.dropout = mask, dropout
        self.embed, self.q = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEADS * (NOPE + ROPE))
        self.down, self.norm = nn.Linear(WIDTH, LATENT + ROPE), nn.Parameter(torch.rand(LATENT) + 0.5)
        self.up, self.out = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False), nn.Linear(HEADS * VALUE, WIDTH)
        self.register_buffer("frequencies", torch.rand(ROPE // 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        b, n, _ = x.shape
        angles = torch.arange(n, dtype=x.dtype)[:, None] * self.frequencies[None]
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        q = self.q(x).view(b, n, HEADS, NOPE + ROPE).transpose(1, 2)
        q = torch.cat((q[..., :NOPE], rotated(q[..., NOPE:], cos, sin)), -1)
        latent, k_rope = self.down(x).split([LATENT, ROPE], -1)
        latent = self.norm * (latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-6))
        latent = F.dropout(latent, self.dropout)
        kv = self.up(latent).view(b, n, HEADS, NOPE + VALUE).transpose(1, 2)
        k_rope = rotated(k_rope.view(b, n, 1, ROPE).transpose(1, 2), cos, sin)
        k = torch.cat((kv[..., :NOPE], k_rope.expand(b, HEADS, n, ROPE)), -1)
        if self.mask == "bias":
            rows = torch.arange(n)
            scores = q @ k.transpose(-1, -2) + (-0.1 * (rows[:, None] - rows[None]).abs()).to(x.dtype)
            y = scores.softmax(-1) @ kv[..., NOPE:]
        else:
            y = F.scaled_dot_product_attention(q, k, kv[..., NOPE:], is_causal=self.mask == "causal")
        return x + self.out(y.transpose(1, 2).reshape(b, n, HEADS * VALUE))


def check(p: int, model: nn.Module, n: int = N, **options: Any) -> Verdict:
    torch.manual_seed(p)
    x = torch.randn(B, n, WIDTH, dtype=torch.float64, requires_grad=True)
    verdict = validate_module(p, model.double(), x, **options)
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.graph.graph}"
    return verdict


def sent(verdict: Verdict) -> str:
    """The note of the one site on what travels."""
    (site,) = verdict.report.sites
    (note,) = (note for note in site.notes if "latents" in note or "made of" in note)
    return note


def test_of_linear_layers_the_latent_travels() -> None:
    verdict = check(2, Tiny(), strategy="ring")
    assert "sends latents: 80 B a token instead of 1.0 KiB, 12.8 times less" in sent(verdict)
    (ring,) = (node for node in verdict.graph.graph.nodes if op_name(node) == "ring_attention")
    assert [list(x.meta["val"].shape) for x in ring.args[1:3]] == [[1, 1, 7, B * LATENT], [1, 1, 7, 0]]


@pytest.mark.parametrize(
    ("p", "n", "mask", "layout", "strategy"),
    [
        (2, 13, "causal", "zigzag", "ring"),
        (3, 14, "causal", "contiguous", "gather"),
        (3, 13, "full", "contiguous", "ring"),
        (4, 17, "causal", "zigzag", "gather"),
        (4, 19, "bias", "contiguous", "ring2"),
    ],
)
def test_latents_and_rotated_keys_travel(p: int, n: int, mask: str, layout: str, strategy: str) -> None:
    verdict = check(p, Latent(mask), n, layout=layout, strategy=strategy)
    assert f"sends latents: {B * (LATENT + ROPE) * 8} B a token instead of" in sent(verdict)


def test_what_is_drawn_travels_as_it_was_drawn() -> None:
    x = torch.randn(B, N, WIDTH)
    (site,) = ringopt.explain(Latent(dropout=0.5).train(), x, world_size=2, options={"strategy": "ring"}).sites
    assert any("sends latents" in note for note in site.notes)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


def test_keys_that_are_not_far_more_than_what_they_are_made_of_travel() -> None:
    (site,) = check(2, Plain(), strategy="ring").report.sites
    assert not any("made of" in note for note in site.notes)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Latent()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return found


def test_lengths_that_open_and_checkpointed_regions() -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(B, n, WIDTH, dtype=torch.float64, requires_grad=True),) for n in (9, 12, 17)]
    run = run_over(Checkpointed().double(), calls, 2, strategy="ring")
    assert all("sends latents" in " ".join(site.notes) for report in run.reports for site in report.sites)


def test_where_the_batch_is_open_keys_travel() -> None:
    calls = [(torch.randn(b, 9, WIDTH, dtype=torch.float64, requires_grad=True),) for b in (2, 3)]
    run = run_over(Tiny().double(), calls, 2, strategy="ring")
    (there,), (later,) = ([" ".join(site.notes) for site in report.sites] for report in run.reports)
    assert "sends latents" in there and "latents" not in later


def on_rank(inner: str, n: int, path: str) -> tuple[float, float, int, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, model = torch.randn(B, n, WIDTH, dtype=torch.float64), Checkpointed().double()
    made, sent = [], (0, 0)
    for compiled in (False, True):
        model.zero_grad()
        options = {"inner_backend": inner, "strategy": "ring", "check_inputs": "first", "timeout": 120}
        run = torch.compile(model, backend="ring", options=options) if compiled else model
        given = x.clone().requires_grad_()
        out = run(given)
        (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        if compiled:
            with record_traffic() as traffic:
                run(given)
            sent = traffic.bytes_sent, ringopt.reports()[-1].bytes_sent
        made.append([out.detach(), given.grad, *(p.grad for p in model.parameters())])
    read = ringopt.load(path).module()(x)
    return difference(made[1], made[0]), float((read - made[0][0]).abs().max()), *sent


@pytest.mark.parametrize(("inner", "n"), [("aot_eager", 13), pytest.param("inductor", 12, marks=pytest.mark.zoo)])
def test_on_ranks_with_checkpoints_and_from_a_file(ranks: Any, inner: str, n: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(B, n, WIDTH, dtype=torch.float64), Checkpointed().double()
    path = tmp_path / "latent.pt2"
    program = ringopt.convert(torch.export.export(model.layer, (x,)), options={"strategy": "ring"})
    torch.export.save(program, path)
    for error, of_file, counted, reported in ranks(2, on_rank, inner, n, str(path), timeout=240):
        assert error < 1e-9 and of_file < 1e-9
        assert counted == reported > 0


def in_16_bits(inner: str, autocast: bool) -> tuple[float, float, str]:
    """How far from float64 the program of one process and that of ranks are, gradients included."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, wide = torch.randn(B, N, WIDTH).bfloat16(), Latent().bfloat16()
    options = {"inner_backend": inner, "strategy": "ring", "timeout": 120}
    made = []
    for dtype, compiled in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        model = copy.deepcopy(wide).to(torch.float32 if autocast and dtype != torch.float64 else dtype)
        run = torch.compile(model, backend="ring", options=options) if compiled else model
        given = x.clone().to(next(model.parameters()).dtype).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast and dtype == torch.bfloat16):
            out = run(given)
        out.double().pow(2).mean().backward()
        made.append([t.detach().double() for t in (out, given.grad, *(p.grad for p in model.parameters()))])
    notes = " ".join(note for site in ringopt.reports()[-1].sites for note in site.notes)
    return difference(made[1], made[0]), difference(made[2], made[0]), notes


@pytest.mark.parametrize(
    ("inner", "autocast"),
    [("aot_eager", True), *(pytest.param("inductor", on, marks=pytest.mark.zoo) for on in (True, False))],
)
def test_in_16_bits_they_are_as_far_off_as_on_one_process(ranks: Any, inner: str, autocast: bool) -> None:
    for alone, shared, notes in ranks(2, in_16_bits, inner, autocast, timeout=240):
        assert "sends latents" in notes and shared < 2 * alone < 0.2
