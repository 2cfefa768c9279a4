"""The exchange of a recurrence starts before it: its maps, and in the backward the gradients of its states, travel
behind what stands beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.ops.segment_messages import SegmentMessages
from ringopt.scans.call import ScanCall
from ringopt.scans.steps import Recurrence
from tests.harness.kernels import DELTA, IN_TURN, LIBRARY, H, K, V, rules_forgotten
from tests.harness.translation import difference
from tests.overlap.test_start_early import WIDTH, data, on_ranks, ordered

SHORT = {"addmm": "mm", "mm": "mm", "reduce_start": "sums", "reduce_bucket": "sums", "scan_start": "maps start"}
SHORT |= {"sharded_scan": "scan", "scan_backward_start": "gradients start", "sharded_scan_backward": "scan backward"}
SHORT |= {"kernel_scan_start": "maps start", "sharded_kernel_scan": "scan"}
SHORT |= {"sharded_kernel_scan_backward": "scan backward"}


class Gated(nn.Module):
    """A recurrence with a gate beside it, which is projected first, so that an order that is left alone hides
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.into, self.out = (nn.Linear(WIDTH, wide) for wide in (WIDTH, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, (decay, new) = F.silu(self.gate(x)), self.into(x).chunk(2, -1)
        state, found = new[:, 0], []
        for t in range(x.shape[1]):
            state = state * decay[:, t].sigmoid() + new[:, t]
            found.append(state)
        return self.out(torch.stack(found, 1) * gate).square().mean()


class Kernel(Gated):
    """The same with an operator of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.decay = nn.Linear(WIDTH, H * (2 * K + V + 1)), nn.Parameter(torch.rand(H) * 0.2)
        self.gate, self.out = nn.Linear(WIDTH, H * V), nn.Linear(H * V, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, projected = F.silu(self.gate(x)), self.into(x).unflatten(-1, (H, -1))
        q, k, v, g = projected.split([K, K, V, 1], -1)
        rule = getattr(torch.ops, LIBRARY).delta_rule
        o, _last = rule(q, F.normalize(k, dim=-1), v, F.logsigmoid(g[..., 0]), self.decay, None, False)
        return self.out(o.flatten(-2) * gate).square().mean()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Rules are for one test."""
    with rules_forgotten():
        yield


def shown(ran: list[str]) -> list[str]:
    """Products and exchanges; products that follow each other as one, sums over the ranks left out."""
    names = [SHORT[name] for name in ran if name in SHORT and SHORT[name] != "sums"]
    return [name for place, name in enumerate(names) if name != "mm" or names[place - 1 : place] != ["mm"]]


def checked(p: int, model: nn.Module, **options: Any) -> tuple[list[str], str]:
    """What runs, the same on all ranks, and what the report says of the exchange; the numbers are right."""
    found, report = on_ranks(p, model.double(), data(13), ordered, **options)
    orders = []
    for (values, ran), expected in found:
        assert not difference(expected, values)
        orders.append(shown(ran))
    assert all(order == orders[0] for order in orders)
    (site,) = report.sites
    return orders[0], re.sub(r"[0-9.]+ [mu]?s", "T", site.notes[-1])


@pytest.mark.parametrize(
    ("p", "layout"), [(2, "contiguous"), pytest.param(2, "zigzag", marks=pytest.mark.zoo), (3, "zigzag")]
)
def test_maps_travel_behind_the_gate(p: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if p == 3:  # all states are kept for the backward, and nobody makes them again
        monkeypatch.setattr(ScanCall, "has_small_states", True)
        monkeypatch.setattr(Recurrence, "states", None)
    order, said = checked(p, Gated(), layout=layout)
    assert order == ["mm", "maps start", "mm", "scan", "mm", "gradients start", "mm", "scan backward", "mm"]
    assert said == "its exchange starts behind gate (T); in the backward behind the gradients of gate, out (T)"


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_so_do_those_of_a_kernel(p: int) -> None:
    """In the backward the kernel's forward is computed again first: there its exchange starts with it."""
    ringopt.rule(f"{LIBRARY}::delta_rule", DELTA)
    order, said = checked(p, Kernel())
    assert order == ["mm", "maps start", "mm", "scan", "mm", "scan backward", "mm"]
    assert said == (
        "its exchange starts behind gate (T); in the backward with it, for the kernel computes its forward again there "
        "first"
    )


def test_ranks_that_run_one_after_the_other_have_nothing_to_start() -> None:
    ringopt.rule(f"{LIBRARY}::delta_rule", IN_TURN)
    order, said = checked(2, Kernel())
    assert "maps start" not in order
    assert said == "its exchange starts with it: the ranks run one after the other"


def test_states_that_wait_beside_them_count_as_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward the states before all steps of a rank wait too: 512 bytes of messages, and 7 states of 256."""
    monkeypatch.setattr("ringopt.overlap.meanwhile.allowed", lambda rates: 600)
    order, said = checked(2, Gated(), layout="contiguous")
    assert "maps start" in order and "gradients start" not in order
    assert "and at most 600 B may be" in said


def test_messages_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator reads what its start has posted, and nothing else."""
    arrived = SegmentMessages.arrived
    monkeypatch.setattr(SegmentMessages, "arrived", lambda *given: [x * 0 for x in arrived(*given)])
    with pytest.raises(AssertionError):
        checked(2, Gated())
