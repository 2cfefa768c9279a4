"""`ringopt.plan` beside steps that ran: bytes to the byte, pairs and layouts the same, memory within 15%."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringopt
from ringopt.planner.plan import Plan
from ringopt.tools.benchmarks.workers.training import VOCABULARY, Llama
from tests.harness.alone import Ran, step_of
from tests.passes.test_layouts import Translator

Made = tuple[nn.Module, dict[str, Any]]
SMALL, LARGE = (1, 32), (2, 128)  # layers and width


def decoder(n: int, layers: int, width: int) -> Made:
    return Llama(layers, max(width, 64), False), {"ids": torch.randint(VOCABULARY, (1, n))}


def encoder(n: int, layers: int, width: int) -> Made:
    """BERT over two texts, one of them padded, with a head that returns all its logits."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=2 * n, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    mask, ids = torch.ones(2, n, dtype=torch.long), torch.randint(VOCABULARY, (2, n))
    mask[1, -n // 3 :] = 0
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def vit(n: int, layers: int, width: int) -> Made:
    """A picture of (n - 1) patches, in a square, and the class token."""
    from transformers import ViTConfig, ViTForImageClassification

    side = 4 * round((n - 1) ** 0.5)
    config = ViTConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=2,
        image_size=side, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    picture, labels = torch.randn(2, 3, side, side), torch.zeros(2, dtype=torch.long)
    return ViTForImageClassification(config), {"pixel_values": picture, "labels": labels}


def planned(build: Callable[..., Made], n: int, size: tuple[int, int], training: bool, **asked: Any) -> Plan:
    model, inputs = build(n, *size)
    with torch.set_grad_enabled(training):
        return ringopt.plan(model, **{"lengths": [n], **asked}, **inputs)


def ran(build: Callable[..., Made], n: int, size: tuple[int, int], p: int, training: bool, **options: Any) -> list[Ran]:
    return [step_of(lambda: build(n, *size), rank, p, training, **options) for rank in range(p)]


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("build", "n", "training"), [(encoder, 33, True), pytest.param(vit, 26, False, marks=pytest.mark.zoo)]
)
def test_bytes_of_encoders_are_those_of_a_step(build: Any, n: int, training: bool) -> None:
    (point,) = planned(build, n, SMALL, training, world_size=2).points
    steps = ran(build, n, SMALL, 2, training, inner_backend="aot_eager")
    assert point.bytes == max(step.bytes for step in steps)
    assert {(site.strategy, site.layout) for site in point.sites} == {
        (site.strategy, site.layout) for site in steps[0].sites
    }


@pytest.mark.zoo
def test_bytes_of_a_decoder_also_at_a_length_that_was_not_traced() -> None:
    """There, to a row at each edge of the shards."""
    found = planned(decoder, 65, SMALL, True, world_size=2, lengths=[65, 96])
    for point, error in zip(found.points, (0.0, 0.01), strict=True):
        options = {"strategy": point.strategies, "layout": point.layout, "inner_backend": "aot_eager"}
        steps = ran(decoder, point.length, SMALL, point.world_size, True, **options)
        assert point.bytes == pytest.approx(max(step.bytes for step in steps), rel=error, abs=0), point


@pytest.mark.zoo
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("build", "n"), [(decoder, 511), (decoder, 1024), (encoder, 256), (encoder, 255), (vit, 226), (vit, 257)]
)
def test_bytes_and_memory_of_every_shape(build: Any, n: int, training: bool, p: int) -> None:
    (point,) = planned(build, n, LARGE, training, world_size=p).points
    steps = ran(build, n, LARGE, p, training)
    assert point.bytes == max(step.bytes for step in steps)
    assert point.memory == pytest.approx(max(step.memory for step in steps), rel=0.15)


# ---- what is no plain self-attention ---------------------------------------------------------------------------------
class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@pytest.mark.zoo
def test_bytes_of_dilated_attention() -> None:
    """Segments that lie across an edge of the shards: of 61 rows on 3 ranks, and where they were traced."""

    def build(n: int, *_: int) -> Made:
        torch.manual_seed(0)
        return Dilated(), {"x": torch.randn(2, n, 16)}

    options = {"segment_lengths": (16, 64), "dilation_rates": (1, 2), "layout": "contiguous"}
    found = planned(build, 64, SMALL, True, world_size=[2, 3, 1024], lengths=[64, 61, 2**20], options=options)
    by_size = {(point.length, point.world_size): point for point in found.points}
    for n, p in ((64, 2), (61, 3)):
        steps = ran(build, n, SMALL, p, True, **options, inner_backend="aot_eager")
        assert by_size[n, p].bytes == max(step.bytes for step in steps) > 0
    assert 0 < by_size[2**20, 1024].bytes < by_size[2**20, 2].bytes * 3


class Looked(nn.Module):
    """Attention, of which a row is picked by a number that only the run knows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return mixed.index_select(1, row).square().mean()


def test_rows_that_are_looked_up_count_as_if_one_rank_had_them() -> None:
    def build(n: int, *_: int) -> Made:
        torch.manual_seed(0)
        return Looked(), {"x": torch.randn(1, n, 16), "row": torch.tensor([3, 5])}

    found = planned(build, 64, SMALL, False, world_size=2)
    steps = ran(build, 64, SMALL, 2, False, inner_backend="aot_eager")
    assert "looked up by number" in " ".join(found.notes)
    assert found.points[0].bytes == max(step.bytes for step in steps)  # here it has


@pytest.mark.zoo
def test_each_sequence_has_the_layout_that_the_run_takes() -> None:
    def build(n: int, *_: int) -> Made:
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(1, n, 16, dtype=torch.float64, generator=draw)
        return Translator(), {"x": x, "ids": torch.randint(11, (1, n // 2), generator=draw)}

    (point,) = planned(build, 2048, SMALL, True, world_size=2, hardware="cpu").points
    model, inputs = build(2048)
    report = ringopt.explain(model, **inputs, world_size=2, hardware="cpu")
    assert len({site.layout for site in report.sites}) > 1
    assert [(site.strategy, site.layout) for site in point.sites] == [
        (site.strategy, site.layout) for site in report.sites
    ]
