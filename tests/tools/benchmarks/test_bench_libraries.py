"""`ringopt bench models --library`: models of other libraries, tiny by rules."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ringopt.tools.benchmarks.libraries import LIBRARIES, models_of
from ringopt.tools.benchmarks.libraries.seeded import first_of, images, seeded, thinned
from ringopt.tools.benchmarks.libraries.timm_models import smallest
from ringopt.tools.benchmarks.models.judged import judged_apart
from ringopt.tools.benchmarks.tables import models
from ringopt.tools.common.command import CommandError
from tests.tools.benchmarks.test_bench_models import run

OF_EACH = {
    "diffusers": "PixArtTransformer2DModel",
    "litgpt": "Gemma-3-1b-it",
    "timm": "test_vit",
    "torchaudio": "Conformer",
    "torchvision": "swin_t",
    "x_transformers": "alibi_pos_bias",
}


def test_a_library_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(CommandError, match=r"the models are those of timm: .*; pip install timm"):
        run(None, library="timm")  # type: ignore[arg-type]


def test_the_smallest_of_a_module_by_its_name() -> None:
    assert smallest(["vit_base_patch16_224", "vit_tiny_patch16_224", "test_vit2", "test_vit"]) == "test_vit"
    assert smallest(["efficientformer_l7", "efficientformer_l1"]) == "efficientformer_l1"
    assert smallest(["tiny_vit_21m_224", "tiny_vit_5m_224"]) == "tiny_vit_5m_224"


def test_of_blocks_in_a_row_that_are_alike_two_are_kept() -> None:
    blocks = nn.Sequential(nn.Linear(3, 4), *(nn.Linear(4, 4) for _ in range(5)), nn.ReLU(), nn.ReLU(), nn.ReLU())
    kept = thinned(nn.Sequential(blocks, nn.Linear(4, 4)))
    assert [type(block) for block in kept[0]] == [nn.Linear] * 3 + [nn.ReLU] * 3
    assert kept(torch.ones(2, 3)).shape == (2, 4)


def test_of_the_forms_the_first_that_fits_is_taken() -> None:
    """Thinned, unless the model then does not fit."""

    def made(blocks: int) -> nn.Module:
        return nn.ModuleList(nn.Linear(1, 1) for _ in range(blocks))

    def given(model: Any, blocks: int, asked: int) -> int:
        if len(model) != asked:
            raise RuntimeError(f"{len(model)} of {asked}")
        return blocks

    assert [len(first_of(made, partial(given, asked=asked), [1, 4])[0]) for asked in (2, 4)] == [2, 4]
    with pytest.raises(ValueError, match="RuntimeError: 1 of 9; or RuntimeError: 2 of 9; or RuntimeError: 4 of 9"):
        first_of(made, partial(given, asked=9), [1, 4])


def test_gates_that_begin_closed_are_open() -> None:
    def made() -> nn.Module:
        layer = nn.Linear(2, 2)
        nn.init.zeros_(layer.weight)
        return layer

    one, other = seeded(made), seeded(made)
    assert one.weight.any() and torch.equal(one.weight, other.weight)
    assert one.weight.dtype == torch.float64 and not one.training
    assert images(8).shape == (2, 3, 8, 8) and images(8, 4).shape == (2, 3, 4, 8, 8)


def test_words_are_whole_numbers_by_the_names_that_libraries_give_them() -> None:
    """A list of images may be called x as well."""
    pytest.importorskip("transformers")
    from ringopt.tools.benchmarks.models.conformance import words_of

    words = torch.ones(2, 9, dtype=torch.long)
    assert words_of({"idx": words}) is words and words_of({"x": words}) is words
    assert words_of({"x": images(8)}) is None and words_of({"x": [images(8)]}) is None


@pytest.mark.zoo
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_of_each_is_exact(library: str) -> None:
    pytest.importorskip(library)
    kind = f"{library}/{OF_EACH[library]}"
    assert OF_EACH[library] in models_of(library).kinds()
    row = judged_apart(models.WORKER, kind, 2, 600, "aot_eager")
    assert row["verdict"] == "exact", row["reason"]
