"""Models of linear attention and state spaces, alone or beside attention, are sharded whole and exact: nothing but what
is returned is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringopt.backend  # noqa: F401  (teaches Dynamo)
from ringopt.frontend.loops.rolled import rolls_loops
from ringopt.tools.benchmarks.libraries.widened import widen
from tests.harness.lengths import Lengths
from tests.harness.translation import captured_graphs, validate_graph
from tests.zoo.hybrid_models import HYBRIDS, build
from tests.zoo.outcomes import in_float64

TOKEN_BY_TOKEN = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma", "rwkv", "lfm2", "lfm3")
CHUNKS_OF_64 = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid")
GATHERED = {"minimax": "matmul"}  # a last block that is shorter than the others


def length(name: str, ragged: bool) -> int:
    if name in TOKEN_BY_TOKEN:
        return 23 if ragged else 24
    if name == "minimax":  # of chunks of 16
        return 60 if ragged else 64
    return (360 if ragged else 384) if name in CHUNKS_OF_64 else 90 if ragged else 96


def cases() -> list[ParameterSet]:
    return [
        pytest.param(name, ragged, marks=[] if (name, ragged) == ("minimax", False) else [pytest.mark.zoo])
        for name in HYBRIDS
        for ragged in (False, True)
        if not (ragged and name == "xlstm")  # which takes whole chunks alone
    ]


@pytest.mark.parametrize("name, ragged", cases())
def test_it_stays_on_its_shards(name: str, ragged: bool) -> None:
    model, keywords = build(name, length(name, ragged))
    (graph,) = captured_graphs(model, (), keywords, fullgraph=True)
    with sdpa_kernel(SDPBackend.MATH):
        verdict = validate_graph(2, *in_float64(*graph), 1e-10)
    assert verdict.wrong == "" and verdict.report.refusal is None
    assert verdict.report.sharded_fraction >= 0.95
    assert {gather.op for gather in verdict.report.gathers} <= {"output", GATHERED.get(name, "output")}
    assert all(site.refusal is None for site in verdict.report.sites)


class InFloat64(Lengths):
    """Of each graph, with all that it computes in less."""

    def __call__(self, gm: Any, inputs: Any) -> Any:
        widen(gm)
        return super().__call__(gm, inputs)


SUMMED = ("nemotron_h", "granitemoehybrid", "zamba2", "bamba", "falcon_h1", "mamba2")
LENGTHS = [(2, 150), (2, 180), (2, 135), (2, 200), (2, 250), (3, 140), (5, 130)]
# Loops over chunks of 64 tokens, of which each rank has two or more, and over tokens.
LOOPS = ("qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "rwkv", "minimax")
LONGER = [(2, 300), (2, 350), (2, 420), (2, 260), (3, 330), (5, 280)]
WHOLE_BLOCKS = [(2, 256), (2, 320), (2, 192), (2, 384), (3, 224), (5, 208)]  # of 16, which MiniMax does not pad


@pytest.mark.zoo
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's own scan, beside which all is held, is younger")
@pytest.mark.parametrize("name", [*SUMMED, *LOOPS])
def test_any_length_has_the_graph_of_the_second(name: str) -> None:
    """And the batch may change: rows are padded to whole chunks of 16, or 64, or go one by one."""
    torch._dynamo.reset()
    model = build(name, 100)[0].double()
    backend = rolls_loops(InFloat64(2))
    compiled = torch.compile(model, backend=backend)
    with sdpa_kernel(SDPBackend.MATH):
        for batch, tokens in {"minimax": WHOLE_BLOCKS}.get(name, LONGER if name in CHUNKS_OF_64 else LENGTHS):
            ids = torch.randint(3, 60, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
            compiled(input_ids=ids, labels=ids, use_cache=False)
    _static, *dynamic = backend.reports
    assert len(dynamic) == 2  # one more for any batch
    assert not any("these sizes only" in note or "is fixed" in note for report in dynamic for note in report.notes)
    assert all(report.sharded_fraction >= 0.99 for report in backend.reports)
    assert all({gather.op for gather in report.gathers} <= {"output"} for report in dynamic)
