"""What a program names is shown as text: no name reaches a terminal or a page as something that these obey."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn
from torch.export import export

import ringopt
from ringopt.drivers.announce import raise_or_warn
from ringopt.errors import OptionError
from ringopt.output.plainly import Plainly
from ringopt.output.printable import UNSAFE, all_printable, logger, printable
from ringopt.tools.cli import main

LINK = "\x1b]8;;http://evil\x07text\x1b]8;;\x1b\\"
HOSTILE = f"\x1b[2J\x1b[31m{LINK}\r\x9b1m\u202eback\u2066\u2028\ud800[red]"


def test_what_a_terminal_obeys_is_written_out() -> None:
    assert printable("\x1b[2J\r\x9b\u202e\u2066\u2028\ud800") == r"\x1b[2J\r\x9b\u202e\u2066\u2028\ud800"
    assert printable(LINK) == r"\x1b]8;;http://evil\x07text\x1b]8;;\x1b" + "\\"
    kept = "tab\tline\nµ → 漢字 é \\x1b"
    assert printable(kept) == kept
    assert printable(printable(HOSTILE)) == printable(HOSTILE)
    assert all_printable({"\r": ["\x1b", 3, None]}) == {r"\r": [r"\x1b", 3, None]}


def test_colours_stay() -> None:
    console = Console(force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(Plainly(Text("\x1b[2Jname", style="red")))
    assert captured.get().rstrip() == "\x1b[31m\\x1b[2Jname\x1b[0m"


def test_errors_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    assert str(OptionError("a\x1b[2J")) == r"a\x1b[2J"
    logger("ringopt.here").warning("%s is odd", "a\u202e")
    assert caplog.messages == [r"a\u202e is odd"]
    assert logger("ringopt.here") is logging.getLogger("ringopt.here") and len(logger("ringopt.here").filters) == 1


class Attention(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q)


class Named(nn.Module):
    """Its attention is in a module of a hostile name."""

    def __init__(self) -> None:
        super().__init__()
        self.name = HOSTILE.replace(".", "")
        self.add_module(self.name, Attention())

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(x).sin()  # type: ignore[no-any-return]


def test_a_report_a_warning_and_a_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(1, 2, 3, 8)  # on four ranks the sequence is too short
    report = ringopt.explain(Named(), x, world_size=4, options={"dump": str(tmp_path)})
    raise_or_warn(report, ringopt.Options())
    shown = [report.text(verbose=True), str(report), caplog.text, *(file.read_text() for file in tmp_path.rglob("*.*"))]
    assert len(shown) > 10 and r"\x1b" in shown[0] and r"\x1b" in shown[2]
    for text in shown:
        assert not UNSAFE.search(text)


# ---- files of others -------------------------------------------------------------------------------------------------
def rewritten(source: Path, target: Path, names: bool) -> None:
    """With hostile modules and source lines, and `names` of nodes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("models/model.json"):
                text = data.decode()
                if names:
                    for node in ("linear", "scaled_dot_product_attention", "sin", "cos"):
                        for key in ('"name": ', '"as_name": '):
                            text = text.replace(f'{key}"{node}"', key + json.dumps(HOSTILE + node))
                        text = text.replace(f'"{node}": {{"dtype"', json.dumps(HOSTILE + node) + ': {"dtype"')
                model = json.loads(text)
                for node in model["graph_module"]["graph"]["nodes"]:
                    where = HOSTILE.replace(";", "").replace(",", "")
                    node["metadata"]["nn_module_stack"] = f"L__self__,x.{where},w.{where}"
                    node["metadata"]["stack_trace"] = f'File "{HOSTILE}", line 19, in {HOSTILE}\n    {HOSTILE}'
                data = json.dumps(model).encode()
            new.writestr(name, data)


class Plain(nn.Module):
    def __init__(self, last: str) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), last

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return getattr(torch, self.last)(mixed).cumprod(2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", [False, True])
def test_commands_and_pages_of_hostile_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], names: bool) -> None:
    files = []
    for last in ("sin", "cos"):
        plain, hostile = tmp_path / f"plain_{last}.pt2", tmp_path / f"{last}.pt2"
        torch.export.save(export(Plain(last), (torch.zeros(1, 2, 8, 4),)), plain)
        rewritten(plain, hostile, names)
        files.append(str(hostile))
    page, other = str(tmp_path / "diff.html"), str(tmp_path / "report.html")
    commands: list[list[str]] = [
        ["diff", *files, "--all", "--html", page], ["diff", *files, "--stat"], ["diff", *files, "--json"],
        ["explain", files[0], "--world-size", "2", "--html", other], ["explain", files[0], "--json"],
    ]  # fmt: skip
    shown = ""
    for command in commands:
        main(command)
        shown += "".join(capsys.readouterr())
    assert shown.count("is refused") == len(commands) and not UNSAFE.search(shown)
    assert not Path(page).exists() and not Path(other).exists()
