"""Kernels of fla, mamba-ssm and causal-conv1d: their graph stays whole, and their tokens stay on shards. The libraries
are stand-ins (tests/harness/stub_libraries.py), which compute in torch and refuse fake tensors as a kernel does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt.backend
from ringopt.frontend.libraries import teach
from ringopt.frontend.libraries.operators import define, defined
from ringopt.ir.nodes import op_name
from ringopt.rules.declare import Tokenwise
from tests.harness import stub_libraries as stubs
from tests.harness.errors import worst_of
from tests.harness.translation import Verdict, validate

H, K, V = 4, 4, 3
WIDTH = 8


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    torch._dynamo.reset()
    with stubs.libraries():
        yield


class Layer(nn.Module):
    """A mixer of tokens around a kernel, as models have them; `call(q, k, v, g, beta)` are B T H D."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.into, self.out, self.call = nn.Linear(WIDTH, H * (3 * K + V + 2)), nn.Linear(H * V, WIDTH), call

    def forward(self, x: Tensor) -> Tensor:
        q, k, g, v, decay, beta = self.into(x).unflatten(-1, (H, -1)).split([K, K, K, V, 1, 1], -1)
        k, g, decay = F.normalize(k, dim=-1), F.logsigmoid(g), F.logsigmoid(decay)[..., 0]
        return x + self.out(self.call(q, k, v, g, decay, beta.sigmoid()[..., 0]).flatten(-2))


def constant(value: float) -> Tensor:
    return torch.full((H,), value, dtype=torch.float64)


CALLS: dict[str, Callable[..., Tensor]] = {
    "gated delta rule": lambda q, k, v, g, decay, beta: stubs.chunk_gated_delta_rule(
        q, k, v, g=decay, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )[0],
    "fewer keys than values": lambda q, k, v, g, decay, beta: stubs.chunk_gated_delta_rule(
        q[:, :, :1], k[:, :, :1], v, decay, beta, 0.5
    )[0],
    "gate in the kernel": lambda q, k, v, g, decay, beta: stubs.chunk_gated_delta_rule(
        q, k, v, decay, beta, use_gate_in_kernel=True, A_log=constant(-1.0), dt_bias=constant(0.5)
    )[0],
    "kda": lambda q, k, v, g, decay, beta: stubs.chunk_kda(q, k, v, g, beta, output_final_state=True)[0],
    "delta rule": lambda q, k, v, g, decay, beta: stubs.chunk_delta_rule(q, k, v, beta)[0],
    "gla": lambda q, k, v, g, decay, beta: stubs.chunk_gla(q, k, v, g)[0],
    "gla, values first": lambda q, k, v, g, decay, beta: stubs.chunk_gla(q, k, v, g, state_v_first=True)[0],
    "simple gla": lambda q, k, v, g, decay, beta: stubs.chunk_simple_gla(q, k, v, decay)[0],
    "retention": lambda q, k, v, g, decay, beta: stubs.chunk_simple_gla(q, k, v, g_gamma=constant(-0.1))[0],
    "first state": lambda q, k, v, g, decay, beta: stubs.chunk_gla(
        q, k, v, g, None, q.mean(1)[..., None] * v[:, 0, :, None]
    )[0],
}  # fmt: skip


ENDS = {"in segments": [0, 4, 9, 13], "at an edge": [0, 3, 7, 13], "of one token": [0, 6, 7, 13], "one": [0, 13]}
PACKED = {
    **{
        f"packed, {name}": lambda q, k, v, g, decay, beta, ends=ends: stubs.chunk_gated_delta_rule(
            q, k, v, decay, beta, cu_seqlens=torch.tensor(ends)
        )[0]
        for name, ends in ENDS.items()
    },
    "packed, kda": lambda q, k, v, g, decay, beta: stubs.chunk_kda(
        q, k, v, g, beta, cu_seqlens=torch.tensor([0, 8, 13])
    )[0],
}


class Mamba(nn.Module):
    """A layer of Mamba 2: in one call of the library, or the norm and the last product apart."""

    def __init__(
        self, fused: bool, normed: bool = True, before: bool = False, packed: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.of = None if packed is None else torch.repeat_interleave(torch.tensor(packed))[None].int()
        self.fused, self.normed, self.before, self.heads, self.groups, self.states = fused, normed, before, 4, 2, 3
        self.channels = WIDTH + 2 * self.groups * self.states
        self.into = nn.Linear(WIDTH, WIDTH + self.channels + self.heads)
        self.conv, self.conv_bias = (nn.Parameter(torch.randn(self.channels, *taps)) for taps in ((3,), ()))
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.rand(self.heads)) for _ in range(3))
        self.norm, self.out = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        zxbcdt, decay = self.into(x), -self.A_log.exp() * 0.1
        if self.fused:
            return x + stubs.mamba_split_conv1d_scan_combined(
                zxbcdt, self.conv, self.conv_bias, self.dt_bias, decay, D=self.D, chunk_size=4, activation="silu",
                rmsnorm_weight=self.norm if self.normed else None, outproj_weight=self.out.weight,
                outproj_bias=self.out.bias, headdim=WIDTH // self.heads, ngroups=self.groups,
                norm_before_gate=self.before, seq_idx=self.of,
            )  # fmt: skip
        z, xbc, dt = zxbcdt.split([WIDTH, self.channels, self.heads], -1)
        xbc = stubs.causal_conv1d_fn(x=xbc.mT, weight=self.conv, bias=self.conv_bias, activation="silu").mT
        rows, both = xbc[..., :WIDTH].unflatten(-1, (self.heads, -1)), xbc[..., WIDTH:]
        b, c = both.unflatten(-1, (2, self.groups, self.states)).unbind(2)
        y, _last = stubs.mamba_chunk_scan_combined(
            rows, dt, decay, b, c, chunk_size=4, D=self.D, z=None, dt_bias=self.dt_bias, dt_softplus=True,
            return_final_states=True,
        )  # fmt: skip
        return x + self.out(y.flatten(-2) * z.sigmoid())


AHEAD = {"inner_backend": "aot_eager"}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda call=call: Layer(call) for name, call in CALLS.items()},
    "mamba 2": lambda: Mamba(fused=False),
    "mamba 2 in one": lambda: Mamba(fused=True),
    "mamba 2 in one, normed before the gate": lambda: Mamba(fused=True, before=True),
    "mamba 2 in one, without a norm": lambda: Mamba(fused=True, normed=False),
}


def drawn(tokens: int = 13, batch: int = 2) -> Tensor:
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64)


def verdict(model: nn.Module, p: int, batch: int = 2, **options: Any) -> Verdict:
    torch.manual_seed(0)
    found = validate(p, model.double(), drawn(batch=batch), **options)
    assert found.wrong == ""
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.zoo)])
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_whole_and_numbers_are_those_of_the_library(name: str, inner_backend: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]().double(), drawn().requires_grad_()
    compiled = torch.compile(model, backend="ring", fullgraph=True, options={"inner_backend": inner_backend})
    leaves = [x, *model.parameters()]
    wanted, found = (torch.autograd.grad(run(x).square().sum(), leaves, allow_unused=True) for run in (model, compiled))
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_stay_on_shards(name: str, p: int) -> None:
    found = verdict(MODELS[name](), p, strategy="ring")
    (site,) = found.report.sites
    assert (site.form, site.strategy) == ("scan", "states"), site
    assert [gather.op for gather in found.report.gathers] == ["output"]
    assert "sharded_kernel_scan" in {op_name(node) for node in found.graph.graph.nodes}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("p", "layout"), [(2, "contiguous"), (2, "zigzag"), (3, "contiguous")])
@pytest.mark.parametrize("name", PACKED)
def test_no_state_goes_over_between_packed_sequences(name: str, p: int, layout: str) -> None:
    packed(Layer(PACKED[name]), p, layout)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("p", "layout"), [(2, "contiguous"), (2, "zigzag"), (3, "contiguous")])
@pytest.mark.parametrize("ends", [(4, 5, 4), (7, 6), (6, 1, 6), (13,)])
def test_numbers_of_sequences_tell_them_apart_as_well(ends: tuple[int, ...], p: int, layout: str) -> None:
    packed(Mamba(fused=True, packed=ends), p, layout)


def packed(model: nn.Module, p: int, layout: str) -> None:
    (site,) = verdict(model, p, batch=1, layout=layout, strategy="ring").report.sites
    assert site.strategy == "states" and "it packs sequences: no state goes over from one to the next" in site.notes


def test_a_state_behind_packed_sequences_is_computed_whole() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        o, last = stubs.chunk_gla(q, k, v, g, output_final_state=True, cu_seqlens=torch.tensor([0, 4, 13]))
        assert last is not None
        return o * last.mean()

    (site,) = verdict(Layer(call), 2, batch=1).report.sites
    assert "it packs sequences, and reads states" in str(site.refusal)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "fewer keys than values"])
def test_or_heads_are_shared(name: str, layout: str) -> None:
    found = verdict(MODELS[name](), 2, strategy="ulysses", layout=layout)
    (site,) = found.report.sites
    named = {op_name(node) for node in found.graph.graph.nodes}
    groups = "mamba" in name and layout == "zigzag"  # two, for four chunks
    assert site.strategy == ("states" if groups else "heads"), site
    assert groups or (site.kernel in named and "turn" in named and "sharded_kernel_scan" not in named)
    assert [gather.op for gather in found.report.gathers] == ["output"]
    assert found.report.sharded_fraction == 1 or name == "first state"  # which is a mean of all tokens


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_of_shared_heads(name: str, layout: str) -> None:
    (site,) = verdict(Layer(PACKED[name]), 2, batch=1, layout=layout, strategy="ulysses").report.sites
    assert site.strategy == "heads"


def test_the_faster_way_is_chosen_and_told() -> None:
    (site,) = verdict(Layer(CALLS["kda"]), 2).report.sites
    assert site.strategy == site.predictions[0].strategy and len(site.predictions) == 2
    assert site.predictions[0].seconds <= site.predictions[1].seconds
    assert any(note.startswith(f"strategy {site.strategy} ") and "predicted (others: " in note for note in site.notes)


def test_a_parameter_whose_heads_are_in_another_dim_keeps_heads_together() -> None:
    """A_log [1, 1, H, 1]: its dim 0 is no single head for all."""
    given = lambda: constant(-1.0).view(1, 1, H, 1)  # noqa: E731
    call = lambda q, k, v, g, decay, beta: stubs.chunk_gated_delta_rule(  # noqa: E731
        q, k, v, decay, beta, use_gate_in_kernel=True, A_log=given(), dt_bias=constant(0.5)
    )[0]
    (site,) = verdict(Layer(call), 2, strategy="ulysses", layout="contiguous").report.sites
    assert site.strategy == "states" and any("A_log 1" in note for note in site.notes)


def test_a_library_of_another_release_is_warned_of_and_breaks_the_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_original: Any) -> Any:
        raise TypeError("another signature")

    found = torch.compiler.disable(lambda x: 2 * x)
    monkeypatch.setitem(sys.modules, "another", SimpleNamespace(kernel=found))
    monkeypatch.setitem(teach.FORMS, ("another", "kernel"), fails)
    assert torch.equal(torch.compile(lambda x: found(x) + 1, backend="ring")(torch.ones(3)), 3 * torch.ones(3))
    assert "calls of another.kernel break the graph" in caplog.text and "another signature" in caplog.text


@pytest.mark.parametrize("p", [2, 3])
def test_heads_that_ranks_cannot_share_evenly_stay_together(p: int) -> None:
    name = "fewer keys than values" if p == 2 else "kda"  # one head of keys; four heads for three ranks
    found = verdict(Layer(CALLS[name]), p, strategy="ulysses", layout="contiguous").report.sites[0].strategy
    assert found == ("heads" if p == 2 else "states")


def test_complex_numbers_have_a_gradient() -> None:
    """mamba-ssm's A may be of them. What has none, indices for one, is not asked for any."""
    rule = lambda **_given: Tokenwise({"x": 0, "rows": 0}, 0)  # noqa: E731
    turn = lambda x, y, rows: (x * y.conj() * x)[rows]  # noqa: E731
    define("turned", "Tensor x, Tensor y, Tensor rows", 1, turn, lambda x, _y, rows: x[rows], rule)
    x, y = (torch.randn(3, dtype=torch.complex128, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(defined("turned"), (x, y, torch.tensor([2, 0, 2])))


def test_what_is_known_of_no_rule_breaks_the_graph_as_before() -> None:
    layer = Layer(lambda q, k, v, g, decay, beta: stubs.chunk_gated_delta_rule(q, k, v, decay, beta, cp_context=F)[0])
    x = drawn()
    torch.testing.assert_close(torch.compile(layer.double(), backend="ring", options=AHEAD)(x), layer(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, backend="ring", fullgraph=True, options=AHEAD)(x)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_packed_sequences_are_convolved_apart(activation: str | None) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 11), torch.randn(5, 4), torch.randn(5)
    of = torch.tensor([[0] * 4 + [1] * 7, [0] * 1 + [1] * 2 + [2] * 8])
    run = lambda *given: stubs.causal_conv1d_fn(*given, activation=activation)  # noqa: E731
    compiled = torch.compile(run, backend="ring", fullgraph=True, options=AHEAD)
    torch.testing.assert_close(compiled(x, weight, bias, of), run(x, weight, bias, of))
    torch.testing.assert_close(compiled(x, weight, None), run(x, weight, None))


# ---- on real ranks ---------------------------------------------------------------------------------------------------
def on_ranks(name: str, lengths: list[int], strategy: str) -> list[tuple[float, str]]:
    """The largest error of outputs and gradients at each length, relative to the largest number; and the strategy."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, found = MODELS[name]().double(), []
    with stubs.libraries():
        compiled = torch.compile(model, backend="ring", options={"strategy": strategy})
        for n in lengths:
            x = drawn(n).requires_grad_()
            leaves, pair = [x, *model.parameters()], []
            for run in (compiled, model):
                out = run(x)
                pair.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
            errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(*pair, strict=True) if b is not None]
            found.append((float(worst_of(*errors)), ringopt.reports()[-1].sites[0].strategy))
    return found


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "p", "strategy"), [("gated delta rule", 2, "ulysses"), ("kda", 3, "auto"), ("mamba 2 in one", 2, "ring")]
)
def test_several_lengths_on_real_ranks_through_inductor(ranks: Any, name: str, p: int, strategy: str) -> None:
    """A length that is open, from the second on, is shared by states."""
    for of_rank in ranks(p, on_ranks, name, [13, 20, 13], strategy):
        assert max(error for error, _strategy in of_rank) < 1e-10
        assert of_rank[0][1] == ("heads" if strategy == "ulysses" else "states")
        assert of_rank[1][1] == "states"
