"""A recurrence that is not affine in what it carries: each rank runs its steps when the one before it is done."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.backend import reports
from ringopt.ops.scan_segments import SegmentedScan
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traits import sent_bytes
from ringopt.scans.not_affine import can_be_shared
from ringopt.scans.trace import kinds_of
from ringopt.torch_compat.symbolic_shapes import ShapeEnv
from tests.harness.capturing import largest_error
from tests.harness.translation import validate
from tests.scans.bodies import Scan, drawn
from tests.sharding.test_scan_heads import WIDTH, Cell, verdict

BYTES = 8  # of a number


class Cells(nn.Module):
    """torch's own cell of a GRU, in a loop behind an attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out[:, t] = h
        return out, h


class Layers(nn.Module):
    """A loop over times, of layers that share their weights: what it carries is the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        for at in range(times.shape[0]):
            x = self.mixed(x + times[at].sin()).tanh() - x.mean(2, keepdim=True)
        return x + F.scaled_dot_product_attention(x, x, x)


class Chunks(nn.Module):
    """A fast weight that a chunk of four tokens changes, and squashes (test-time training)."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, 4))
        keys, values = F.normalize(parts.sin(), dim=-1), parts.cos()
        state, out = torch.zeros(x.shape[0], WIDTH, WIDTH, dtype=x.dtype), torch.zeros_like(parts)
        for at in range(parts.shape[1]):
            state = (state + keys[:, at].mT @ values[:, at]).tanh() - state.mean(-1, keepdim=True)
            out[:, at] = keys[:, at] @ state
        out = out.flatten(1, 2)[:, None]
        return out + F.scaled_dot_product_attention(out, out, out, is_causal=True)


class Levels(nn.Module):
    """A loop over eight levels of each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, :, 0])
        for level in range(x.shape[2]):
            h = self.mixed(h + x[:, :, level]).tanh()
        h = h[:, None]
        return h + F.scaled_dot_product_attention(h, h, h)


class Counts(nn.Module):
    """A whole number beside the state, larger than what float32 holds."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        count = torch.zeros(WIDTH, dtype=torch.int64)
        for t in range(x.shape[1]):
            h = (h.flip(-1) * 2 + x[:, t]).tanh()
            count = count.flip(-1) + (h[0] > 0) * (2**25 + 1)
            out[:, t] = h
        return out, count


@pytest.mark.parametrize(
    "kind, p, batch, layout",
    [
        ("tanh", 2, 3, "zigzag"),
        ("lstm", 3, 1, "contiguous"),
        ("lstm", 4, 1, "zigzag"),
        pytest.param("tanh", 3, 2, "zigzag", marks=pytest.mark.zoo),
        pytest.param("lstm", 2, 1, "zigzag", marks=pytest.mark.zoo),
        pytest.param("tanh", 4, 1, "contiguous", marks=pytest.mark.zoo),
    ],
)
def test_ranks_run_one_after_the_other_and_gather_nothing(kind: str, p: int, batch: int, layout: str) -> None:
    found = verdict(p, Cell(kind), batch, layout=layout)
    (site,) = found.report.sites
    assert (site.form, site.strategy, site.refusal) == ("scan", "in turn", None)
    assert any("one after the other, for a step is not affine in what it carries" in note for note in site.notes)
    assert "its exchange starts with it: the ranks run one after the other" in site.notes
    assert found.report.sharded_fraction == 1.0
    assert [gather.op for gather in found.report.gathers] == ["output"]
    segments, carries = p * (1 + (layout == "zigzag")), {"tanh": 1, "lstm": 2}[kind]
    assert site.bytes_sent == (segments - 1) * carries * batch * WIDTH * BYTES * (p - 1)


def test_each_segment_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentedScan, "broadcast", lambda _self, _number, state, _run: state)
    with pytest.raises(AssertionError):
        verdict(2, Cell("tanh"), 1)


def test_a_loop_over_layers_is_none() -> None:
    """A state as large as the sequence is no less than what a step reads."""
    x, times = (torch.randn(*shape, WIDTH, dtype=torch.float64).requires_grad_() for shape in ((1, 1, 24), (6,)))
    found = validate(2, Layers(), x, times)
    assert found.wrong == "" and [site.form for site in found.report.sites] == ["sdpa"]
    assert any("a recurrence is no scan" in note for note in found.report.notes)


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_no_token_is_gathered_within_a_chunk(p: int) -> None:
    x = torch.randn(1, 4 * 17, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = validate(p, Chunks(), x.requires_grad_(), layout="contiguous")
    assert found.wrong == "" and {site.strategy for site in found.report.sites if site.form == "scan"} == {"in turn"}
    assert [gather.op for gather in found.report.gathers] == ["output"]


def test_by_heads_is_for_a_known_number_of_steps() -> None:
    """A state that is more than what is read of it cannot be handed on."""
    scan = Scan(lambda s, x: ((s := s * s + x), s), [drawn(4, 64)], [drawn(8, 1, 1)], [])
    kinds = kinds_of(scan.init, scan.xs, scan.consts)
    assert can_be_shared(scan.text, kinds, 8, 2, set())
    assert not can_be_shared(scan.text, kinds, ShapeEnv().create_unbacked_symint(), 2, set())


def test_gradients_are_handed_back_between_all_segments() -> None:
    scan = Scan(lambda s, x: ((s := (s * s.sum() + x).tanh()), s), [drawn(2, 3)], [drawn(6, 2, 3)], [])
    given = {"init": scan.init, "xs": scan.xs, "consts": [], "body": scan.text, "layout": "zigzag", "steps": 24}
    call = SizedCall("sharded_scan_backward", {**given, "segments": 8, "ends": False}, None, 4, 0)
    assert sent_bytes(call) == 7 * 2 * 3 * BYTES * 3


@pytest.mark.parametrize("tokens", [40, 41])
def test_levels_of_each_token_are_shared_as_they_stand(tokens: int) -> None:
    """Of neither the tokens nor the levels anything changes ranks."""
    x = torch.randn(1, tokens, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = validate(2, Levels(), x.requires_grad_())
    assert found.wrong == "" and [site.form for site in found.report.sites] == ["sdpa"]
    assert found.report.sharded_fraction == 1.0 and [gather.op for gather in found.report.gathers] == ["output"]


def test_whole_numbers_are_not_handed_on() -> None:
    x = torch.randn(1, 24, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = validate(2, Counts(), x)
    assert found.wrong == "" and not found.report.sites
    assert any("a recurrence is no scan" in note for note in found.report.notes)


def over_lengths(shapes: list[tuple[int, int]]) -> list[tuple[float, list[str], int]]:
    torch._dynamo.reset()
    module, found = Cells().double(), []
    compiled = torch.compile(module, backend="ring", options={"inner_backend": "aot_eager"})
    before = len(reports())
    for batch, tokens in shapes:
        torch.manual_seed(tokens)
        x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        error = largest_error(compiled, module, x)
        found.append((error, [site.strategy for site in reports()[-1].sites], len(reports()) - before))
    return found


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_one_graph_serves_any_length(ranks: Any, p: int) -> None:
    shapes = [(1, 24), (1, 17), (1, 40), (1, 13)]
    for error, strategies, graphs in chain(*ranks(p, over_lengths, shapes)):
        assert error < 1e-12 and strategies[-1] == "in turn" and graphs <= 2
