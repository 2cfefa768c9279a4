"""Options that make attention dilated: what composes, what is refused, what the report says, the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import ringopt
from ringopt.distributed.lookup import mesh_of
from ringopt.drivers.compile import transform
from ringopt.errors import OptionError
from ringopt.ir.nodes import emit
from ringopt.options import Options
from tests.context_parallel.dilated.reference import Patterns, dilated
from tests.harness.threads import run_on_threads
from tests.harness.translation import Seat, Values, captured, difference, values_and_gradients

PATTERNS = Patterns((8, 23, 60), (1, 2, 4))
OPTIONS: Any = {"segment_lengths": PATTERNS.lengths, "dilation_rates": PATTERNS.rates}
N = 50
X = torch.randn(2, N, 16, dtype=torch.float64)
SEEN = torch.rand(2, N, generator=torch.Generator().manual_seed(0)) > 0.3

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class SelfAttention(nn.Module):
    """Projections around `attend(q, k, v, seen)`, q, k, v [B, H, S, D]."""

    def __init__(self, attend: Attend, heads: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.heads = attend, heads
        self.qkv, self.out = (nn.Linear(16, width, dtype=torch.float64) for width in (48, 16))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(self.attend(q, k, v, seen).transpose(1, 2).flatten(2))
        return y


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    assert seen is not None
    return F.scaled_dot_product_attention(q, k, v, seen[:, None, None])


def causal_and_padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    assert seen is not None
    mask = torch.ones(N, N, dtype=torch.bool).tril() & seen[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, mask)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """With finite fills, as many models hide padding."""
    assert seen is not None
    scores = q @ k.mT * q.shape[3] ** -0.5 + torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    return scores.softmax(-1) @ v


CASES = {
    "plain": plain,
    "causal": causal,
    "padded": padded,
    "causal and padded": causal_and_padded,
    "spelled": spelled_out,
}


def run_on(p: int, module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> list[Values]:
    """Outputs and gradients of each rank, of the graph that the passes make."""
    gm, flat = captured(module, *inputs)
    if p == 1:
        graph = transform(gm, flat, Options(**options), mesh_of("pretend:0/1")).graph
        assert graph is not None
        return [values_and_gradients(graph, flat)]
    graphs = [transform(gm, flat, Options(**options), Seat(rank, p)).graph for rank in range(p)]
    return run_on_threads(p, lambda mesh: values_and_gradients(graphs[mesh.rank], flat))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("p", [1, pytest.param(2, marks=pytest.mark.zoo), 3])
def test_it_is_the_definition_on_any_number_of_ranks(p: int, name: str) -> None:
    patterns = Patterns(PATTERNS.lengths, PATTERNS.rates, "causal" in name)
    takes_mask = name not in ("plain", "causal")
    inputs = (torch.randn(2, N, 16, dtype=torch.float64), *([SEEN] if takes_mask else []))

    def right(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return dilated(q, k, v, patterns, seen)

    expected = values_and_gradients(*captured(SelfAttention(right), *inputs))
    for found in run_on(p, SelfAttention(CASES[name]), inputs, **OPTIONS):
        assert difference(expected, found, 1e-9) == ""


class WithSinks(nn.Module):
    """Attention with a learned logit for each head, spelled out; `dilate` in place of it is the definition."""

    def __init__(self, dilate: Callable[..., Tensor] | None = None):
        super().__init__()
        self.dilate, self.sinks = dilate, nn.Parameter(torch.tensor([0.0, 1.0, -1.0, 3.0], dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        if self.dilate is not None:
            return self.dilate(q, k, v, PATTERNS, sinks=self.sinks)
        scores = q @ k.mT * q.shape[3] ** -0.5
        logits = self.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, logits], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("p", [1, 3])
def test_sinks_stay_with_their_gradient(p: int) -> None:
    inputs = (torch.randn(2, N, 16, dtype=torch.float64),)
    expected = values_and_gradients(*captured(SelfAttention(WithSinks(dilated)), *inputs))
    for found in run_on(p, SelfAttention(WithSinks()), inputs, **OPTIONS):
        assert difference(expected, found, 1e-9) == ""


def test_dropout_is_the_same_on_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    seed = torch.tensor(5)
    monkeypatch.setattr("ringopt.passes.find_attention.draw_seed", lambda graph, like: constant(graph, like, seed))
    inputs = (torch.randn(2, N, 16, dtype=torch.float64),)
    (alone,) = run_on(1, SelfAttention(dropped), inputs, **OPTIONS)
    assert difference(run_on(1, SelfAttention(plain), inputs, **OPTIONS)[0], alone, 1e-9) != ""
    for found in run_on(3, SelfAttention(dropped), inputs, **OPTIONS):
        assert difference(alone, found, 1e-9) == ""


def constant(graph: fx.Graph, like: fx.Node, number: Tensor) -> fx.Node:
    how = {"dtype": torch.int64, "device": torch.device("cpu")}
    return emit(graph, torch.ops.aten.full.default, ([], int(number)), like, how)


@pytest.mark.parametrize("p", [1, 2])
def test_queries_that_are_padding_too(p: int) -> None:
    """As some models make it: the outer product of a mask with itself."""

    def both(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        assert seen is not None
        return F.scaled_dot_product_attention(q, k, v, seen[:, None, :, None] & seen[:, None, None])

    def right(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        assert seen is not None
        return dilated(q, k, v, PATTERNS, seen) * seen[:, None, :, None]

    inputs = (torch.randn(2, N, 16, dtype=torch.float64), SEEN)
    expected = values_and_gradients(*captured(SelfAttention(right), *inputs))
    for found in run_on(p, SelfAttention(both), inputs, **OPTIONS):
        assert difference(expected, found, 1e-9) == ""


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_options_reach_the_operator(strategy: str) -> None:
    patterns = Patterns(PATTERNS.lengths, PATTERNS.rates, rule="torchscale")
    inputs = (torch.randn(2, N, 16, dtype=torch.float64),)
    expected = values_and_gradients(*captured(SelfAttention(lambda q, k, v, _: dilated(q, k, v, patterns)), *inputs))
    how = {"layout": "zigzag", "strategy": strategy, "dilation_offsets": "torchscale", "kernel": "math"}
    for found in run_on(3, SelfAttention(plain), inputs, **OPTIONS, **how):
        assert difference(expected, found, 1e-9) == ""


def test_other_lengths_compile_again_on_one_process() -> None:
    torch._dynamo.reset()
    right = SelfAttention(lambda q, k, v, seen: dilated(q, k, v, PATTERNS, seen))
    model = torch.compile(SelfAttention(padded), backend="ring", options={**OPTIONS, "inner_backend": "aot_eager"})  # type: ignore[call-overload]
    for n in (50, 43, 60):
        x, seen = torch.randn(2, n, 16, dtype=torch.float64), torch.arange(n).expand(2, n) % 5 != 2
        torch.testing.assert_close(model(x, seen), right(x, seen), rtol=1e-9, atol=1e-9)


@pytest.mark.zoo
def test_on_real_ranks_with_inductor(ranks: Any) -> None:
    x = torch.randn(2, N, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = step(SelfAttention(lambda q, k, v, seen: dilated(q, k, v, PATTERNS, seen)), x)
    for found in ranks(2, compiled_step, x):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def compiled_step(x: Tensor) -> list[Tensor]:
    return step(torch.compile(SelfAttention(padded), backend="ring", options=OPTIONS), x)  # type: ignore[arg-type]


def step(model: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x, SEEN)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


# ---- the report ------------------------------------------------------------------------------------------------------
def explained(module: Any, *args: Any, p: int = 2, **options: Any) -> ringopt.Report:
    torch._dynamo.reset()
    return ringopt.explain(module, *args, world_size=p, options={**OPTIONS, **options})


def test_the_report_tells_what_is_spared() -> None:
    (site,) = explained(SelfAttention(plain), X).sites
    assert (site.pattern, site.strategy, site.layout) == ("dilated(8:1,23:2,60:4)", "gather", "contiguous")
    assert site.notes[0] == "computes 32.5% of the FLOPs of full attention"
    assert site.notes[-2] == (
        "all ranks together send 16.0 KiB a forward, where a ring of full attention would send 25.0 KiB"
    )
    assert site.notes[-1].startswith("its exchange starts with it, for nothing stands between that needs no K and V; ")
    assert site.bytes_sent == 4224


def test_segments_within_the_shards_send_nothing() -> None:
    options: Any = {"segment_lengths": (2048, 4096), "dilation_rates": (1, 2)}
    report = explained(SelfAttention(plain), torch.randn(1, 8192, 16, dtype=torch.float64), **options)
    assert (report.sites[0].strategy, report.sites[0].bytes_sent) == ("local", 0)


def test_tokens_left_out_are_told() -> None:
    (site,) = explained(
        SelfAttention(plain), torch.randn(2, N, 16, dtype=torch.float64), dilation_rates=(2, 2, 4)
    ).sites
    assert site.notes[1].startswith("dilated(8:2,23:2,60:4) keeps 0 of 50 tokens in no head, and leaves ")


def test_long_causal_patterns_take_zigzag() -> None:
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    options: Any = {"segment_lengths": (64,), "dilation_rates": (1,)}
    assert explained(SelfAttention(causal), x, **options).sites[0].layout == "zigzag"
    assert (
        explained(SelfAttention(causal), x, segment_lengths=(8,), dilation_rates=(1,)).sites[0].layout == "contiguous"
    )


# ---- refusals --------------------------------------------------------------------------------------------------------
class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in (self.q(x), self.k(memory), self.v(memory)))
        return F.scaled_dot_product_attention(q, k, v)


def with_mask(make: Callable[[Tensor, Tensor], Tensor]) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        rows, keys = torch.arange(N)[:, None], torch.arange(N)
        return F.scaled_dot_product_attention(q, k, v, make(rows, keys))

    return attend


REFUSED = {
    "window": (with_mask(lambda q, k: (q - k).abs() < 5), r"a window\(5,both\) mask does not compose with dilation"),
    "chunks": (with_mask(lambda q, k: q // 8 == k // 8), "a chunked\\(8,both\\) mask does not compose with dilation"),
    "bias": (with_mask(lambda q, k: -(q - k).abs().double()), "a bias is added to its scores"),
    "padding that differs by query": (
        with_mask(lambda q, k: (q + k) % 5 != 0),
        "its mask differs by query, and is no padding of keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_stays_as_it_was(name: str) -> None:
    attend, told = REFUSED[name]
    (site,) = explained(SelfAttention(attend), X).sites
    assert site.refusal is None and not site.pattern.startswith("dilated")
    with pytest.raises(BackendCompilerFailed, match=f"RefusedError: not dilated: attention: {told}. With on_refusal"):
        torch.compile(SelfAttention(attend), backend="ring", options={**OPTIONS, "on_refusal": "error"})(X)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("length", "told"),
    [
        (N, "it is no self-attention: keys and values come from where the queries do not"),
        (30, "it is no self-attention: 50 queries look at 30 keys"),
    ],
)
def test_cross_attention_stays_as_it_was(length: int, told: str) -> None:
    (site,) = explained(Cross(), torch.randn(2, N, 16), torch.randn(2, length, 16)).sites
    assert (site.not_dilated, site.refusal) == (told, None)


def test_bare_operands_may_come_from_anywhere() -> None:
    """Keys and values that have no origin in common with each other are no memory."""
    x = [torch.randn(1, 2, N, 4) for _ in range(3)]
    assert explained(F.scaled_dot_product_attention, *x).sites[0].not_dilated is None


def test_nonsense() -> None:
    with pytest.raises(OptionError, match="2 lengths and 1 rates"):
        Options(segment_lengths=(4, 8), dilation_rates=(1,))
    with pytest.raises(OptionError, match="both are tuples of whole numbers"):
        Options(segment_lengths=(4, 8))
    with pytest.raises(OptionError, match="strategy='halo': dilated attention travels by one of 'auto', 'gather'"):
        explained(SelfAttention(plain), X, strategy="halo")
