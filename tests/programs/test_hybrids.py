"""Models of linear attention and state spaces, alone or beside attention, are sharded whole and exact: nothing but what
is returned is gathered."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringopt.backend  # noqa: F401  (teaches Dynamo)
from tests.harness.translation import captured_graphs, validate_graph
from tests.zoo.hybrid_models import HYBRIDS, build
from tests.zoo.outcomes import in_float64

TOKEN_BY_TOKEN = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma", "rwkv", "lfm2", "lfm3")
CHUNKS_OF_64 = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid")
# The states between chunks, which one writes into one tensor; a last block that is shorter than the others.
GATHERED = {"xlstm": "slice_scatter", "minimax": "matmul"}


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
