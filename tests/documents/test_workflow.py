"""The workflow of examples/diff.yml as a runner has it: its steps in bash, on a repository with main and a branch."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # accelerate brings it

from ringopt.tools.diff_ci import LONGEST
from tests.structure import ROOT

FILE = ROOT / "examples" / "diff.yml"
MODEL = """\
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def small():
    torch.manual_seed(0)
    return Model(), (torch.randn(1, 32, 16),)
"""
WEIGHED = """\
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return (weights * weights.amax()) @ v.sort(-2).values
"""
CALLED = "        return F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def programs_of(folder: Path) -> None:
    """`ringopt` and `python` are those of this checkout; `gh` keeps what it was given."""
    scripts = {
        "ringopt": f'exec "{sys.executable}" -m ringopt.tools.cli "$@"',
        "python": f'exec "{sys.executable}" "$@"',
        "gh": 'echo "$@" > gh.txt && cp "${@: -1}" comment.md',
    }
    folder.mkdir()
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(stat.S_IRWXU)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What actions/checkout leaves: the branch, merged into main. It weighs by what ranks know together only."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "model.py").write_text(MODEL)
    git(folder, "add", "model.py")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "checkout", "-q", "-b", "branch")
    (folder / "model.py").write_text(MODEL.replace(CALLED, WEIGHED))
    git(folder, "commit", "-q", "-am", "two")
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "--no-ff", "branch", "-m", "merged")
    return folder


@pytest.mark.zoo
def test_its_steps_do_what_they_are_named_for(clone: Path, tmp_path: Path) -> None:
    """A comment that fits and a page of the difference; then annotations, and the end that the broken rules make."""
    made = workflow()
    [job] = made["jobs"].values()
    assert made[True] == "pull_request"  # YAML's `on`
    assert made["permissions"] == {"contents": "read", "pull-requests": "write"}
    programs_of(tmp_path / "bin")
    summary = tmp_path / "summary.md"
    given = {
        **{name: str(value) for name, value in made["env"].items()},
        **{"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        **{"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(clone)},
    }
    ends = {}
    for step in job["steps"]:
        if "run" in step and step["name"] != "Install":
            own = {name: re.sub(r"\$\{\{.*?\}\}", "7", value) for name, value in step.get("env", {}).items()}
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            ends[step["name"]] = subprocess.run(
                command, cwd=clone, env={**given, **own}, capture_output=True, text=True, check=False
            )
    *before, last = ends.values()
    assert [one.returncode for one in before] == [0] * 3, [one.stderr for one in before]
    comment = (clone / "comment.md").read_text()
    assert summary.read_text() == comment and 0 < len(comment) < LONGEST
    assert comment.startswith("### main.pt2 → branch.pt2") and "%getitem\\_6" in comment
    assert "| `getitem_6` | " in comment and "| FLOPs of products | 10,368 | 63,488 |" in comment
    assert (clone / "gh.txt").read_text().split()[:3] == ["pr", "comment", "7"]
    assert "ring_attention" in (clone / "diff.html").read_text()
    assert last.returncode == 1, last.stderr
    assert last.stdout.startswith("::error title=ringopt diff::flops+10%25: 10,368")
    assert "::error file=model.py,line=13,title=ringopt diff: the first value that is off::" in last.stdout
