"""options={"dump": folder}, TORCH_LOGS and TORCH_TRACE: the passes at work, to look at."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringopt
from ringopt.errors import OptionError
from ringopt.passes import LINE
from tests.harness.pages import data_of
from tests.tools.test_cli import Causal


def explained(folder: Path, module: nn.Module | None = None) -> ringopt.Report:
    return ringopt.explain(module or Causal(), torch.zeros(1, 64, 16), world_size=2, options={"dump": str(folder)})


def test_every_pass_leaves_its_graph(tmp_path: Path) -> None:
    report = explained(tmp_path)
    [folder] = tmp_path.glob("rank*/graph*")
    names = ["capture", *(step.name for step in LINE)]
    texts = sorted(folder.glob("*.txt"))
    assert [file.name for file in texts] == [f"{place:02}_{name}.txt" for place, name in enumerate(names)]
    assert "= scaled_dot_product_attention(" in texts[0].read_text()
    assert "= ring_attention(" in texts[-1].read_text()
    changes = (folder / "changes.diff").read_text()
    assert "--- split_weights\n+++ find_attention\n" in changes
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    pages = {name: data_of((folder / f"{name}.html").read_text()) for name in ("report", "diff")}
    assert [frame["name"] for frame in pages["report"]["graphs"][0]["frames"]] == [*names, "all passes"]
    assert any("ring_attention" in view[2] for view in pages["diff"]["graph"]["views"])
    assert 'href="diff.html"' in (folder / "report.html").read_text()


def test_no_graph_is_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        explained(tmp_path)
    assert sorted(folder.name for folder in (tmp_path / "rank0").iterdir()) == ["graph0", "graph1"]


def test_a_refused_graph_leaves_what_there_was(tmp_path: Path) -> None:
    class Writing(Causal):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.no_grad():
                y.mul_(2)
            return y

    report = explained(tmp_path, Writing())
    assert report.refusal is not None
    [folder] = tmp_path.glob("rank*/graph*")
    assert data_of((folder / "report.html").read_text())["report"]["refusal"] == report.refusal
    assert not (folder / "diff.html").exists()


def test_a_converted_program_is_dumped_once(tmp_path: Path) -> None:
    program = torch.export.export(Causal(), (torch.zeros(1, 64, 16),))
    ringopt.convert(program, {"dump": str(tmp_path)})
    assert [folder.name for folder in tmp_path.glob("rank*/graph*")] == ["graph0"]


@pytest.mark.parametrize("wrong", [3, ""])
def test_a_path_is_expected(wrong: object) -> None:
    with pytest.raises(OptionError, match=r"option dump=.*: expected the path of a folder, as text"):
        ringopt.Options.of({"dump": wrong})


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"option dump: cannot make .*graph0: Not a directory"):
        explained(tmp_path / "file")


@pytest.mark.zoo
def test_logs_and_traces_show_the_passes(tmp_path: Path) -> None:
    code = (
        "import torch; from tests.tools.test_cli import Causal; x = torch.zeros(1, 64, 16);"
        "torch.compile(Causal(), backend='ring', options={'inner_backend': 'eager'})(x)"
    )
    asked = {"TORCH_LOGS": "+ringopt", "TORCH_TRACE": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "after find_attention: 16 nodes\n" in result.stderr
    assert "  + %attention = attention(" in result.stderr
    assert "1 attention site on 1 rank" in result.stderr
    [traced] = (file.read_text() for file in tmp_path.iterdir())
    assert '"name": "ringopt_captured"' in traced
    assert '"name": "ringopt_after_find_attention"' in traced


def test_logs_show_a_conversion_once(caplog: pytest.LogCaptureFixture) -> None:
    program = torch.export.export(Causal(), (torch.zeros(1, 64, 16),))
    with caplog.at_level("DEBUG", logger="ringopt"):
        ringopt.convert(program)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("ringopt.")]
    assert [message.partition(":")[0] for message in said[:-1]] == [f"after {step.name}" for step in LINE]
    assert "  + %attention = attention(" in said[[step.name for step in LINE].index("find_attention")]
    assert "1 attention site on 2 ranks" in said[-1]


# ---- a full disk -----------------------------------------------------------------------------------------------------
def compiled_twice(folder: Path) -> None:
    """At two lengths, each a graph."""
    torch._dynamo.reset()
    model = torch.compile(
        Causal(), backend="ring", dynamic=False, options={"inner_backend": "eager", "dump": str(folder)}
    )
    for length in (64, 96):
        assert model(torch.zeros(1, length, 16)).shape == (1, length, 16)


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("file", ["graph0", "01_", "report.html", "graph1"])
def test_what_cannot_be_written_is_warned_of_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: str, number: int
) -> None:
    made, wrote = Path.mkdir, Path.write_bytes

    def failing(real: Any) -> Any:
        def call(self: Path, *given: Any, **named: Any) -> Any:
            if self.name.startswith(file):
                raise OSError(number, os.strerror(number), str(self))
            return real(self, *given, **named)

        return call

    monkeypatch.setattr(Path, "mkdir", failing(made))
    monkeypatch.setattr(Path, "write_bytes", failing(wrote))
    if file == "graph0" and number != errno.ENOSPC:  # a path that is wrong from the start
        with pytest.raises(Exception, match=r"option dump: cannot make .*graph0"):
            compiled_twice(tmp_path)
        return
    compiled_twice(tmp_path)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"option dump: cannot write in {tmp_path}: {os.strerror(number)}; nothing more is written"]
    assert not list(tmp_path.rglob("*.part"))
