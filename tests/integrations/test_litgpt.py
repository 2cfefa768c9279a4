"""Models of litgpt, made tiny, as its recipes build them: exact, and all of their matrix work on shards."""

from __future__ import annotations

import pytest
import torch

import ringopt.backend  # noqa: F401  (teaches Dynamo)
from tests.harness.translation import validate

pytest.importorskip("litgpt", reason="pip install litgpt")
pytestmark = pytest.mark.zoo

NAMES = ("pythia-14m", "Llama-3.2-1B", "gemma-2-2b", "Mixtral-8x7B-v0.1", "phi-2", "Qwen3-0.6B", "falcon-7b")
SMALL = dict(
    block_size=128, vocab_size=64, padded_vocab_size=64, n_layer=2, n_head=4, n_query_groups=2, n_embd=32,
    intermediate_size=48,
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_family(name: str) -> None:
    """Some compute norms in float32."""
    from litgpt.config import Config
    from litgpt.model import GPT

    torch.manual_seed(0)
    model = GPT(Config.from_name(name, **SMALL)).double()
    found = validate(2, model, torch.randint(0, 64, (2, 45)), tolerance=1e-5)
    assert found.wrong == "" and found.report.sharded_fraction == 1
    assert [gather.op for gather in found.report.gathers] == ["output"]
