"""`ringopt bench models`: tiny configurations by rules, rows of types that crash or hang, runs taken up again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ringopt.tools.benchmarks.libraries.widened import Widened
from ringopt.tools.benchmarks.models.judged import NOTHING, judged_apart
from ringopt.tools.benchmarks.tables import models
from ringopt.tools.common.command import CommandError
from tests.harness.benches import tables

FAMILIES = (
    "bloom", "deepseek_v3", "falcon", "gemma3_text", "gpt2", "gpt_oss", "inkling2_text", "llama", "longcat_flash",
    "mixtral", "qwen3", "recurrent_gemma",
)  # fmt: skip
FAILING = "tests.tools.benchmarks.failing_worker"


class Silent:
    """In the place of rich's progress."""

    console = argparse.Namespace(print=lambda *_, **__: None)

    def track(self, items: Any, description: str) -> Any:
        return items


def run(target: Path, **options: Any) -> Any:
    given = {"pattern": "^(llama|gpt2)$", "ranks": [2, 3], "seconds": 9, "again": False, "html": None, "markdown": None}
    given |= {"library": "transformers", "mapping": ["AutoModelForCausalLM"], "inner": "eager"}
    return models.measure(argparse.Namespace(**{**given, "json": target, **options}), Silent())  # type: ignore[arg-type]


def row_of(worker: str, kind: str, ranks: int, seconds: float, inner: str) -> dict[str, Any]:
    found = {"verdict": "exact", "error": 1e-15, "share": 1.0, "later": 0.5, "bytes": 640.0}
    found |= {"memory": 0.55, "compile": 7.0, "by_inductor": 5.2}
    return {**NOTHING, **found, "type": kind, "ranks": ranks, "hf": kind == "llama"}


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_type_that_crashes_or_hangs_is_a_row() -> None:
    rows = {
        kind: judged_apart(FAILING, kind, 2, 20 if kind != "hangs" else 3, "eager")
        for kind in ("dies", "hangs", "works")
    }
    assert {kind: row["verdict"] for kind, row in rows.items()} == {"dies": "error", "hangs": "hang", "works": "exact"}
    assert rows["dies"]["reason"] == "its process ended: SIGKILL"
    assert rows["hangs"]["reason"] == "not done after 3 s" and rows["hangs"]["seconds"] < 60


@pytest.mark.zoo
@pytest.mark.timeout(7200)
def test_families_are_exact(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = tables("models", "--only", f"^({'|'.join(FAMILIES)})$", "--seconds", "900", str(tmp_path / "models.json"))
    assert {row["type"]: row["verdict"] for row in found["rows"]} == dict.fromkeys(FAMILIES, "exact")
    assert found["totals"]["at_95"] >= len(FAMILIES) - 1  # a loop over experts of LongCat breaks the graph


@pytest.mark.zoo
def test_and_at_another_length() -> None:
    """A second call of the same processes, with fewer tokens."""
    pytest.importorskip("transformers")
    row = judged_apart("ringopt.tools.benchmarks.models.conformance", "llama", 2, 300, "aot_eager")
    assert (row["verdict"], row["share"], row["later"]) == ("exact", 1.0, 1.0)
    assert 0.45 < row["memory"] < 0.65, "half of what one process holds, and a little that both ranks do"


@pytest.mark.zoo
@pytest.mark.timeout(1200)
def test_compiling_takes_no_three_times_as_long_as_inductor_does() -> None:
    pytest.importorskip("transformers")
    row = judged_apart("ringopt.tools.benchmarks.models.conformance", "llama", 2, 900, "inductor")
    assert row["verdict"] == "exact" and 0 < row["compile"] < 3 * row["by_inductor"]


# ---- the table -------------------------------------------------------------------------------------------------------


def test_a_run_is_taken_up_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    asked: list[tuple[str, int]] = []

    def interrupted(worker: str, kind: str, ranks: int, seconds: float, inner: str) -> dict[str, Any]:
        asked.append((kind, ranks))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return row_of(worker, kind, ranks, seconds, inner)

    target = tmp_path / "models.json"
    with patch.object(models, "judged_apart", interrupted), pytest.raises(KeyboardInterrupt):
        run(target)
    assert [(row["type"], row["ranks"]) for row in json.loads(target.read_text())["rows"]] == asked[:2]
    with patch.object(models, "judged_apart", interrupted):
        result = run(target)
    assert sorted(asked[:2] + asked[3:]) == [(kind, ranks) for kind in ("gpt2", "llama") for ranks in (2, 3)]
    assert len(result.rows) == 4


def test_the_pages(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with patch.object(models, "judged_apart", row_of):
        result = run(tmp_path / "a.json", html=tmp_path / "a.html", markdown=tmp_path / "a.md")
    assert result.sentences[0].startswith("4 rows: 4 exact, 0 wrong; in 4 at least 95% of the matrix work is on shards")
    assert "refuses 2 of them, of which 2 are exact here" in result.sentences[0]
    lines = (tmp_path / "a.md").read_text().splitlines()
    assert lines[2].startswith("| type | ranks |")
    assert "| llama | 2 | exact | 1e-15 | 100.0% | 50.0% | 640 |  | 55% | 7 | 5 |" in lines[6]
    assert "llama" in (tmp_path / "a.html").read_text()


def test_wrong_uses(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    other = tmp_path / "other.json"
    other.write_text('{"table": "soak"}')
    with pytest.raises(CommandError, match="did not write; name another"):
        run(other)
    with pytest.raises(CommandError, match="types of AutoModelForCausalLM has it in its name"):
        run(None, pattern="no_such_type")  # type: ignore[arg-type]
    with pytest.raises(CommandError, match="not a class of transformers' factory"):
        run(None, mapping=["BertModel"])  # type: ignore[arg-type]
    with pytest.raises(CommandError, match="not a regular expression"):
        run(None, pattern="(")  # type: ignore[arg-type]


# ---- what is built ---------------------------------------------------------------------------------------------------


def test_layers_are_shortened_together_to_one_of_each_kind() -> None:
    transformers = pytest.importorskip("transformers")
    from ringopt.tools.benchmarks.models.tiny_configs import tiny

    config = tiny(transformers.AutoConfig.for_model("gemma3_text"))
    assert config.layer_types == ["sliding_attention", "full_attention"] and config.num_hidden_layers == 2
    assert config.sliding_window == 16 and config.vocab_size == 128
    assert config.num_attention_heads % config.num_key_value_heads == 0
    stages = tiny(transformers.AutoConfig.for_model("cvt"))  # whose last one skips layers at random
    assert stages.drop_path_rate == [0.0, 0.0, 0.0] and list(stages.mlp_ratio) == [4.0, 4.0, 4.0]


def test_a_part_of_a_model_keeps_what_its_model_asks_of_it() -> None:
    """Even where it is small already, and the part is another one by itself: a layer that is skipped at random."""
    transformers = pytest.importorskip("transformers")
    from ringopt.tools.benchmarks.models.tiny_configs import tiny

    assert transformers.AutoConfig.for_model("parakeet_encoder").layerdrop > 0
    assert tiny(transformers.AutoConfig.for_model("canary")).encoder_config.layerdrop == 0


def test_models_of_other_classes_are_built_with_what_they_take() -> None:
    """A text has as many places for images as the model makes of them, at tokens that no other medium has."""
    pytest.importorskip("transformers")
    from ringopt.tools.benchmarks.models.tiny_transformers import build_auto

    _, translated = build_auto("AutoModelForSeq2SeqLM", "t5")
    assert {name: tuple(value.shape) for name, value in translated.items()} == {
        "input_ids": (2, 64), "decoder_input_ids": (2, 24), "labels": (2, 24)
    }  # fmt: skip
    model, seen = build_auto("AutoModelForImageTextToText", "qwen2_5_vl")
    assert model.config.image_token_id != model.config.video_token_id
    assert int((seen["input_ids"] == model.config.image_token_id).sum()) == 32 and seen["labels"].shape == (2, 80)
    _, heard = build_auto("AutoModel", "wav2vec2")
    assert heard["input_values"].shape == (2, 4000)


@pytest.mark.parametrize("kind", ["deepseek_v3", "t5"])
def test_classifiers_are_given_texts_that_end(kind: str) -> None:
    """Also where a decoder reads the text; and experts, whose grouped products take no float64 there."""
    pytest.importorskip("transformers")
    from ringopt.tools.benchmarks.models.tiny_transformers import build_auto

    model, given = build_auto("AutoModelForSequenceClassification", kind)
    ends = given["input_ids"][:, -1].tolist()
    assert list(given) == ["input_ids"] and ends == [model.config.eos_token_id] * 2
    assert model.config.pad_token_id == 0


@pytest.mark.parametrize(
    ("kind", "stages", "taken"),
    [
        ("depth_anything", 4, ["stage1", "stage2", "stage3", "stage4"]),  # of layers, each of which is a stage
        ("rt_detr", 4, ["stage2", "stage3", "stage4"]),  # of stages of layers, whose widths its encoder is told
        ("maskformer", 4, ["stage1", "stage2", "stage3", "stage4"]),  # of stages that list heads as well
        ("deformable_detr", 4, ["stage2", "stage3", "stage4"]),  # of timm, in whose place ResNet is
    ],
)
def test_a_backbone_has_the_stages_that_its_model_takes(kind: str, stages: int, taken: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from ringopt.tools.benchmarks.models.tiny_configs import WIDTH, tiny

    config = tiny(transformers.AutoConfig.for_model(kind))
    backbone = transformers.AutoBackbone.from_config(config.backbone_config)
    assert config.backbone_config.out_features == taken and len(backbone.stage_names) == stages + 1
    assert sum(parameter.numel() for parameter in backbone.parameters()) < 2_000_000
    if kind == "rt_detr":
        assert list(config.encoder_in_channels) == list(backbone.channels) and config.decoder_in_channels == [WIDTH] * 3


def test_pictures_in_patches_are_given_with_how_many_there_are() -> None:
    pytest.importorskip("transformers")
    from ringopt.tools.benchmarks.models.tiny_transformers import build_auto

    _, seen = build_auto("AutoModelForImageClassification", "siglip2")
    assert seen["pixel_values"].shape == (2, 64, 192) and seen["spatial_shapes"].tolist() == [[8, 8], [8, 8]]


def test_what_asks_for_float32_is_float64() -> None:
    x = torch.rand(5, dtype=torch.float64)
    with Widened():
        found = [x.float(), x.to(torch.float32), x.softmax(0, dtype=torch.float32), torch.ones(5, dtype=torch.float32)]
    assert all(one.dtype == torch.float64 for one in found)
    assert torch.equal(found[0], x) and torch.equal(found[2], x.softmax(0))
