"""Every code block of README and REFERENCE is run, or held against what it names; a new one needs a test here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringopt
from ringopt.rules.declare import REGISTRY
from ringopt.rules.plugins import GROUP, load_rules
from tests.documents.test_pages import README, REFERENCE, ROOT

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def block(page: str, language: str, holds: str = "") -> str:
    [found] = [text for kind, text in BLOCKS.findall(page) if kind == language and holds in text]
    return str(found)


def test_every_block_has_its_test() -> None:
    """Of README: test_documents.py (python), .ci/run and test_pages.py (bash), tests/ir (diff)."""
    assert [kind for kind, _ in BLOCKS.findall(README)] == ["python", "bash", "bash", "diff"]
    assert [kind for kind, _ in BLOCKS.findall(REFERENCE)] == ["bash", "python", "toml", "python"]


def test_the_extras_exist() -> None:
    [line] = block(REFERENCE, "bash").splitlines()
    named = re.sub(r"\(.*?\)", "", line.partition("# extras: ")[2]).replace(" ", "").split(",")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "hf" in named and set(named) <= set(extras)


@torch.library.custom_op("mylib::rotate", mutates_args=())
def rotate(x: Tensor, angles: Tensor) -> Tensor:
    return x * angles.cos()[:, None]


@torch.library.custom_op("mylib::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    turned = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(*turned, is_causal=is_causal, scale=scale).transpose(1, 2).contiguous()


class OfMylib(nn.Module):
    """x: [B, S, H, D]; angles: [S]."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = torch.ops.mylib.rotate(x, angles[:, None])
        return torch.ops.mylib.attend(x, x, x, True, 0.5) + x


def test_the_rules_shard_what_they_name() -> None:
    rotate.register_fake(lambda x, angles: torch.empty_like(x))
    attend.register_fake(lambda q, *others: torch.empty_like(q))
    x, angles = torch.randn(1, 8, 2, 4), torch.randn(8)
    load_rules()
    kept = [dict(level) for level in REGISTRY.levels]
    try:
        exec(block(REFERENCE, "python", "ringopt.rule"), {})
        report = ringopt.explain(OfMylib(), x, angles, world_size=2)
    finally:
        for level, before in zip(REGISTRY.levels, kept, strict=True):
            level.clear()
            level.update(before)
    assert "sharded  causal, ring" in report.text()
    assert "mylib" not in report.text()


def test_the_entry_point_is_the_one_that_is_read() -> None:
    project = tomllib.loads(block(REFERENCE, "toml"))["project"]
    assert list(project["entry-points"]) == [GROUP]


def test_the_lines_for_the_trainer_are_those_of_its_example() -> None:
    """tests/integrations runs them on two ranks."""
    pytest.importorskip("accelerate")
    line, call = filter(None, block(REFERENCE, "python", "accelerate").splitlines())
    names: dict[str, Any] = {"TrainingArguments": lambda *_, parallelism_config: parallelism_config}
    exec(line, names)
    assert eval(call, names).ring_size == 2  # cp_size reads as 1 (REFERENCE says why)
    assert line in Path(ROOT / "examples/train_trainer.py").read_text()
