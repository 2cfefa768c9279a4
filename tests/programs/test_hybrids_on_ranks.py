"""Models of linear attention and state spaces on real ranks: both layouts, batches, few tokens, bfloat16."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringopt.backend import reports
from ringopt.tools.benchmarks.libraries.widened import Widened, widened_ring
from ringopt.tools.benchmarks.models.tiny_transformers import reference_of
from tests.programs.test_hybrids import CHUNKS_OF_64
from tests.zoo.hybrid_models import HYBRIDS, build

pytestmark = pytest.mark.zoo


def calls(name: str) -> list[Tensor]:
    """Three sequences that no chunk divides, and one of fewer chunks than ranks."""
    chunk = 64 if name in CHUNKS_OF_64 else 16
    lengths = (128, 32) if name == "xlstm" else (7 * chunk - 5, 2 * chunk - 3)
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (batch, n), generator=dice) for batch, n in zip((3, 1), lengths, strict=True)]


def numbers(model: Any, ids: Tensor) -> list[Tensor]:
    """Loss, logits and the gradients of all parameters."""
    model.zero_grad()
    found = model(input_ids=ids, labels=ids, use_cache=False)
    found.loss.backward()
    return [
        found.loss.detach(),
        found.logits.detach(),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, of a tensor's largest entry, where that is more than rounding."""
    floor = 1e-4 * max(float(x.abs().max()) for x in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((x.double() - y).abs().max()) / max(float(y.abs().max()), floor) for x, y in pairs)


def errors(name: str, layout: str) -> tuple[float, float]:
    """The largest of both calls, and the share of matrix work on shards in the first: of two chunks, a loop over them
    is not always found."""
    torch._dynamo.reset()
    before = len(reports())
    torch.set_default_dtype(torch.float64)
    model = build(name, 8)[0]
    eager = reference_of(model)
    ring = torch.compile(model, backend=widened_ring(inner_backend="aot_eager", layout=layout))
    found, shares = [], []
    with sdpa_kernel(SDPBackend.MATH):
        for ids in calls(name):
            with Widened():
                expected = numbers(eager, ids)
            found.append(distance(numbers(ring, ids), expected))
            shares.append(min(report.sharded_fraction for report in reports()[before:]))
    return max(found), shares[0]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("p, layout", [(1, "auto"), (2, "contiguous"), (3, "zigzag"), (4, "auto")])
def test_loss_logits_and_gradients(ranks: Any, name: str, p: int, layout: str) -> None:
    # Of xLSTM's 8 chunks on 3 ranks one has 3, and its two layers are so few that K and V of the first, which are made
    # of the ids whole as well, are 5.05% of its products.
    least = 0.949 if (name, p) == ("xlstm", 3) else 0.95
    for error, share in ranks(p, errors, name, layout, timeout=600):
        assert error < 1e-10 and (share >= least or p == 1)


def in_bfloat16(name: str) -> list[float]:
    """How far logits and all gradients are from those in float64, over how far they are on one process in bfloat16."""
    torch._dynamo.reset()
    ids = calls(name)[0]
    exact = reference_of(build(name, 8)[0])
    model = copy.deepcopy(exact).bfloat16()
    ring = torch.compile(copy.deepcopy(model), backend="ring", options={"inner_backend": "aot_eager"})
    with sdpa_kernel(SDPBackend.MATH):
        expected, eager, found = (numbers(one, ids)[1:] for one in (exact, model, ring))
    return [
        norm([x.double() - y for x, y in zip(found[part], expected[part], strict=True)])
        / norm([x.double() - y for x, y in zip(eager[part], expected[part], strict=True)])
        for part in (slice(0, 1), slice(1, None))
    ]


def norm(parts: list[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())


@pytest.mark.parametrize("name", HYBRIDS)
def test_bfloat16_is_no_less_exact_than_on_one_process(ranks: Any, name: str) -> None:
    for ratio in itertools.chain(*ranks(2, in_bfloat16, name, timeout=600)):
        assert ratio < 2
