"""`ringopt convert`: what it writes, prints and refuses."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import ringopt
from ringopt.archive import load_with_provenance
from ringopt.tools.cli import main
from ringopt.tools.command import CommandError
from ringopt.tools.verify import verify
from tests.test_cli import Causal


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """in.pt2 has attention, plain.pt2 has none, open.pt2 has an open length."""
    torch.manual_seed(0)
    made, x = tmp_path_factory.mktemp("programs"), torch.zeros(1, 64, 16)
    length = {"dynamic_shapes": ({1: Dim("n", min=4, max=99)},)}
    for name, module, more in (("in", Causal(), {}), ("plain", Plain(), {}), ("open", Causal(), length)):
        torch.export.save(export(module, (x,), **more), made / f"{name}.pt2")
    return made


def test_a_file_is_written_with_its_provenance(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.pt2"
    options = json.dumps({"layout": "contiguous"})
    arguments = [str(folder / "in.pt2"), str(target), "--explain", "--verify", "--options", options]
    assert main(["convert", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "1 attention sites on 2 ranks" in printed
    assert "out.pt2: 1 of 1 attention sites sharded; on 1 process the largest difference of an output is " in printed
    program, made = load_with_provenance(target)
    assert made is not None
    assert (made["ringopt"], made["options"]["layout"]) == (ringopt.__version__, "contiguous")
    assert [site["strategy"] for site in made["report"]["sites"]] == ["ring"]
    x = torch.randn(1, 64, 16)
    torch.testing.assert_close(program.module()(x), ringopt.load(folder / "in.pt2").module()(x))
    assert list(tmp_path.iterdir()) == [target]


def test_the_diff_of_both_shows_the_site(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "out.pt2")
    main(["convert", str(folder / "in.pt2"), target])
    capsys.readouterr()
    assert main(["diff", str(folder / "in.pt2"), target, "--world-size", "4"]) == 1
    printed = capsys.readouterr().out
    assert "causal: ring, zigzag, flash_cpu" in printed
    assert "unknown" not in printed
    assert main(["diff", target, target]) == 0


def test_force_and_allow_empty(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pt2"
    target.write_text("old")
    assert main(["convert", str(folder / "plain.pt2"), str(target), "--force", "--allow-empty"]) == 0
    assert ringopt.diff(folder / "plain.pt2", target).same


@pytest.mark.parametrize(
    ("source", "target", "more", "sentence"),
    [
        ("absent.pt2", "new.pt2", [], "absent.pt2 does not exist; expected a .pt2 file"),
        ("text.pt2", "new.pt2", [], "text.pt2 is not a .pt2 file"),
        ("in.pt2", "old.pt2", [], "old.pt2 exists; --force overwrites it"),
        ("in.pt2", "no/new.pt2", [], "no is no folder"),
        ("in.pt2", "", ["--force"], "is a folder"),
        ("plain.pt2", "new.pt2", [], "nothing of this program can be sharded: no attention was found. --allow-empty"),
        ("in.pt2", "new.pt2", ["--options", '{"laout": 1}'], "unknown option 'laout'"),
        ("in.pt2", "new.pt2", ["--world-size", "2"], "--world-size tells --verify on how many ranks to run"),
        ("in.pt2", "new.pt2", ["--import", "not_there"], "cannot import 'not_there'"),
        ("done.pt2", "new.pt2", [], "done.pt2 was converted already, by ringopt "),
    ],
)
def test_a_wrong_use_is_one_line_and_writes_nothing(
    source: str, target: str, more: list[str], sentence: str, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "old.pt2").write_text("old")
    (folder / "text.pt2").write_text("no archive")
    if source == "done.pt2":
        main(["convert", str(folder / "in.pt2"), str(folder / source), "--force"])
        capsys.readouterr()
    assert main(["convert", str(folder / source), str(tmp_path / target), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ringopt: error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old.pt2"]
    assert (tmp_path / "old.pt2").read_text() == "old"


# ---- --verify --------------------------------------------------------------------------------------------------------
class Dropped(Causal):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


def test_verify_says_which_rank_fails_and_ends_the_others(folder: Path) -> None:
    with pytest.raises(CommandError, match=r"rank \d of 2 failed: cannot import 'not_there'"):
        verify(ringopt.load(folder / "in.pt2"), folder / "in.pt2", 2, ["not_there"], lambda: None)


def test_verify_tells_chance_from_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.export.save(export(Dropped(), (torch.zeros(1, 64, 16),)), tmp_path / "in.pt2")
    assert main(["convert", str(tmp_path / "in.pt2"), str(tmp_path / "out.pt2"), "--verify"]) == 2
    assert "--verify cannot compare what is drawn at random; export in eval mode" in capsys.readouterr().err


def test_verify_finds_a_wrong_program(folder: Path, tmp_path: Path) -> None:
    program = ringopt.load(folder / "in.pt2")
    wrong = export(Causal(), (torch.zeros(1, 64, 16),))
    torch.export.save(wrong, tmp_path / "wrong.pt2")
    with pytest.raises(CommandError, match=r"outputs differ by .* of the largest element; nothing was written"):
        verify(program, tmp_path / "wrong.pt2", 1, [], lambda: None)


def test_verify_needs_inputs(folder: Path) -> None:
    program = ringopt.load(folder / "in.pt2")
    program._example_inputs = None
    with pytest.raises(CommandError, match="--verify needs example inputs, and the program was saved without them"):
        verify(program, folder / "in.pt2", 1, [], lambda: None)


def test_converting_twice_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("one.pt2", "two.pt2"):
        assert main(["convert", str(folder / "in.pt2"), str(tmp_path / name)]) == 0
    members = [zipfile.ZipFile(tmp_path / name) for name in ("one.pt2", "two.pt2")]
    contents = [{name.partition("/")[2]: file.read(name) for name in file.namelist()} for file in members]
    assert contents[0] == contents[1]
