"""`ringopt convert`: what it writes, prints and refuses."""

from __future__ import annotations

import json
import os
import re
import resource
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import ringopt
from ringopt.frontend.pt2.archive import load_with_provenance
from ringopt.tools.cli import main
from ringopt.tools.common.command import CommandError
from ringopt.tools.verify import verify
from tests.tools.test_cli import Causal


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
    assert "1 of 1 attention, 100% of matrix work on shards, 2 ranks" in printed
    assert "out.pt2: 1 of 1 attention sites sharded; on 1 process the largest difference of an output is " in printed
    assert re.search(r", of a gradient \d\.\de[+-]\d+\n$", printed)
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


def spoil(folder: Path) -> None:
    """Files that are no programs, or no longer."""
    (folder / "text.pt2").write_text("no archive")
    whole = (folder / "in.pt2").read_bytes()
    (folder / "half.pt2").write_bytes(whole[: len(whole) // 2])
    place = whole.index(b"weight_1") + 200
    (folder / "bits.pt2").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    torch.save(Causal().state_dict(), folder / "weights.pt2")
    with zipfile.ZipFile(folder / "zip.pt2", "w") as archive:
        archive.writestr("a.txt", "")
    (folder / "twice.pt2").write_bytes(whole)
    with zipfile.ZipFile(folder / "twice.pt2", "a") as archive:
        archive.writestr("other/models/model.json", "{}")


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
        ("in.pt2", "new.onnx", [], "new.onnx does not end in .pt2, as files of programs do"),
        ("in.pt2", "new.pt2", ["--verify", "--world-size", "2000"], "--verify starts as many processes here; take "),
        ("half.pt2", "new.pt2", [], "half.pt2 is not a .pt2 file"),
        ("bits.pt2", "new.pt2", [], "bits.pt2 is damaged (in/data/weights/weight_"),
        ("zip.pt2", "new.pt2", [], "zip.pt2 is not a .pt2 file of torch.export.save: no program in it"),
        ("twice.pt2", "new.pt2", [], "twice.pt2 is not a .pt2 file of torch.export.save: members of one name"),
        ("weights.pt2", "new.pt2", [], "weights.pt2 is not a .pt2 file of torch.export.save: no program in it"),
    ],
)
def test_a_wrong_use_is_one_line_and_writes_nothing(
    source: str, target: str, more: list[str], sentence: str, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "old.pt2").write_text("old")
    spoil(folder)
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


def test_a_full_disk_is_told_and_leaves_what_there_was(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.pt2").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        assert main(["convert", str(folder / "in.pt2"), str(tmp_path / "out.pt2"), "--force"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "out.pt2 cannot be written: File too large" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("out.pt2", "old")]


def test_a_folder_or_a_pipe_that_cannot_hold_a_file_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / "pipe.pt2")
    for target, said in (("/proc/out.pt2", "cannot be written: "), (folder / "pipe.pt2", "is a device or a pipe")):
        assert main(["convert", str(folder / "in.pt2"), str(target), "--force"]) == 2
        assert f"{target} {said}" in capsys.readouterr().err


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
    said = r"on 1 process \d+ of 6 values differ, .* by .* of its largest element; nothing was written"
    with pytest.raises(CommandError, match=said):
        verify(program, tmp_path / "wrong.pt2", 1, [], lambda: None)


class Detached(Causal):
    """The outputs of Causal, and other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0.5 + x.detach() * 0.5)


def test_verify_finds_wrong_gradients_on_any_rank(folder: Path, tmp_path: Path) -> None:
    program = ringopt.load(folder / "in.pt2")
    wrong = Detached()
    wrong.load_state_dict(program.state_dict)
    torch.export.save(export(wrong, (torch.zeros(1, 64, 16),)), tmp_path / "wrong.pt2")
    with pytest.raises(CommandError, match=r"on 1 process 1 of 6 values differ, the gradient of x by 5\.0e-01 of"):
        verify(program, tmp_path / "wrong.pt2", 1, [], lambda: None)


class Counting(Causal):
    """Its output has no gradient, and it writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x).argmax(-1) + self.count.long()


def test_verify_compares_what_is_written_and_says_where_there_is_no_gradient(folder: Path, tmp_path: Path) -> None:
    program = export(Counting(), (torch.zeros(1, 64, 16),))
    torch.export.save(ringopt.convert(program), tmp_path / "counting.pt2")
    said = verify(program, tmp_path / "counting.pt2", 1, [], lambda: None)
    assert said.endswith("gradients were not compared: no output depends on a parameter or on a floating input")
    again = ringopt.load(tmp_path / "counting.pt2")
    again.state_dict["count"] += 1
    torch.export.save(again, tmp_path / "other.pt2")
    with pytest.raises(CommandError, match="on 1 process 2 of 2 values differ"):
        verify(program, tmp_path / "other.pt2", 1, [], lambda: None)


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
