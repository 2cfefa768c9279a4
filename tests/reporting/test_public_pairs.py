"""Pairs of public models, laid beside each other: what `ringopt diff` finds, in how much of the processor's time.

    python -m pytest -m zoo -s tests/reporting/test_public_pairs.py     # prints the rows of the table in COVERAGE.md

Two layers of each, tiny, with random weights; how many heads and how wide is the same on both sides, all else is as the
library has it by default.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import ringopt
from ringopt.compare.graph_diff import GraphDiff
from ringopt.reporting.diff_page import diff_page
from tests.harness.pages import data_of

PAIRS = (
    ("llama", "mistral"), ("bert", "roberta"), ("gemma2", "gemma3_text"), ("qwen2", "qwen3"), ("gpt2", "gpt_neox"),
)  # fmt: skip
EAGER = {"gemma2": "eager", "gemma3_text": "eager"}  # gemma2 has no other: it caps its scores
TINY = {
    "hidden_size": 32, "n_embd": 32, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 128, "head_dim": 8, "query_pre_attn_scalar": 8,
    "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 8, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
TOKENS = 16


def exported(kind: str) -> torch.export.ExportedProgram:
    """The base model of a type of transformers."""
    transformers = pytest.importorskip("transformers")
    config: Any = transformers.AutoConfig.for_model(kind)
    for name, value in TINY.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types and config.layer_types[-2:]
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation=EAGER.get(kind, "sdpa")).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, (torch.arange(TOKENS)[None] + 1,), strict=False)


def row(pair: tuple[str, str], diff: GraphDiff, seconds: float, size: int) -> str:
    kinds = Counter(change.kind for change in diff.changes)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if kind not in ("same", "resized"))
    nodes = f"{diff.before.nodes}, {diff.after.nodes}"
    alike = kinds["same"] + kinds["resized"]
    return f"| {' / '.join(pair)} | {nodes} | {alike} | {told} | {seconds:.2f} | {size / 1024:.0f} KiB |"


@pytest.mark.zoo
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_pair_of_public_models(pair: tuple[str, str], tmp_path: Path) -> None:
    """Half of one at least is found in the other, and no node is lost."""
    programs = [exported(kind) for kind in pair]
    begun = time.process_time()
    diff = ringopt.diff(*programs)
    seconds = time.process_time() - begun
    page = diff_page(diff, *pair)
    print("\n" + row(pair, diff, seconds, len(page)))
    assert sum(change.before is not None for change in diff.changes) == diff.before.nodes
    assert sum(change.after is not None for change in diff.changes) == diff.after.nodes
    kinds = Counter(change.kind for change in diff.changes)
    assert 2 * kinds["same"] > diff.before.nodes or pair == ("gpt2", "gpt_neox")  # which has layers of another shape
    assert data_of(page)["summary"] == str(diff)
    (tmp_path / "page.html").write_text(page)
