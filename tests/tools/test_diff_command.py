"""`ringopt diff`: exit codes, what it prints, and what it says to wrong uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import ringopt
from ringopt.tools.cli import main


class Two(nn.Module):
    def __init__(self, second: str) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return getattr(torch, self.second)(mixed)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """One program with sin and one with cos."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("sin", "cos"):
        torch.export.save(export(Two(name), (torch.zeros(1, 2, 8, 4),)), folder / f"{name}.pt2")
    return str(folder / "sin.pt2"), str(folder / "cos.pt2")


def test_a_file_and_itself_say_so_and_end_with_0(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", files[0], files[0]]) == 0
    assert capsys.readouterr().out == "no difference: 4 nodes on both sides\n"


def test_differences_end_with_1(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *files]) == 1
    printed = capsys.readouterr().out
    assert "4 nodes before, 4 after: 3 same, 1 replaced\n" in printed
    assert "  - %sin = sin(%scaled_dot_product_attention)\n  + %cos = cos(%scaled_dot_product_attention)\n" in printed
    assert "\x1b" not in printed


def test_all_folds_nothing_and_stat_tells_numbers(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["diff", *files, "--all"])
    assert "    %x = input user_input x" in capsys.readouterr().out
    main(["diff", *files, "--stat"])
    printed = capsys.readouterr().out
    assert "nodes by module" in printed
    assert "%" not in printed


def test_values_are_compared_on_inputs(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", files[0], files[0], "--inputs", "random:1"]) == 0
    assert capsys.readouterr().out == "no difference: 4 nodes on both sides, 3 values and 3 gradients compared\n"
    assert main(["diff", files[0], files[0], "--inputs", "random:1", "--no-gradients"]) == 0
    assert "3 values and 0 gradients compared" in capsys.readouterr().out
    assert main(["diff", *files, "--inputs", "random:1"]) == 1
    printed = capsys.readouterr().out
    assert "of 3 values compared 1 differ, the first %cos; of 3 gradients compared " in printed
    assert "\n  %cos = cos(%scaled_dot_product_attention)" in printed
    assert "      value: off by " in printed
    assert "      source: test_diff_command.py:" in printed
    assert "values, 1 of 3 in order of computation" in printed
    assert main(["diff", *files, "--inputs", "absent.pt"]) == 2
    assert capsys.readouterr().err.startswith("ringopt: error: inputs: absent.pt does not exist; ")


def test_rules_say_what_ends_with_1(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *files, "--fail-on", "nodes", "--fail-on", "bytes+10%", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("### ")
    assert main(["diff", *files, "--inputs", "random", "--fail-on", "error>1e-5", "--format", "github"]) == 1
    assert capsys.readouterr().out.startswith("::error title=ringopt diff::error>1e-5: %25cos is off by ")
    assert main(["diff", *files, "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["schema"] == 3


def test_what_is_unknown_says_how_to_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, dynamic in (("fixed", None), ("open", ({2: Dim("n", min=4, max=64)},))):
        program = export(Two("sin"), (torch.zeros(1, 2, 8, 4),), dynamic_shapes=dynamic)
        torch.export.save(program, f"{name}.pt2")
        torch.export.save(ringopt.convert(program), f"{name}_out.pt2")
    assert main(["diff", "fixed.pt2", "fixed_out.pt2", "--stat"]) == 1
    hint = "unknown: a file serves any number of ranks; --world-size N counts its bytes and FLOPs for N\n"
    assert capsys.readouterr().out.endswith(hint)
    assert main(["diff", "fixed.pt2", "fixed_out.pt2", "--stat", "--world-size", "2"]) == 1
    assert "unknown" not in capsys.readouterr().out
    assert main(["diff", "fixed.pt2", "fixed_out.pt2", "--world-size", "9"]) == 2
    said = "ringopt: error: this program has a zigzag sequence of 8 rows, and 9 ranks need 18; use fewer\n"
    assert capsys.readouterr().err == said
    assert main(["diff", "open.pt2", "open_out.pt2", "--stat", "--world-size", "2"]) == 1
    assert capsys.readouterr().out.endswith("open (s0), so its bytes and FLOPs are not numbers\n")


def test_json(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", files[0], files[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    assert main(["diff", *files, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["counts"]["replaced"]) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no.pt2", "SIN"], "no.pt2 does not exist; expected a .pt2 file"),
        (["SIN", "README.md"], "README.md is not a .pt2 file"),
        (["SIN", "tests"], "tests is a folder; expected a .pt2 file"),
        (["SIN", "SIN", "--html", "not/there/a.html"], "--html not/there/a.html: there is no folder not/there"),
    ],
)
def test_a_wrong_file_is_one_line_and_ends_with_2(
    arguments: list[str], sentence: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *(files[0] if argument == "SIN" else argument for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"ringopt: error: {sentence}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a.pt2"], "the following arguments are required: B.pt2"),
        (["a.pt2", "b.pt2", "--stat", "--json"], "not allowed with argument"),
        (["a.pt2", "b.pt2", "--world-size", "0"], "'0' is not a number of ranks, 1 or more"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["diff", *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
