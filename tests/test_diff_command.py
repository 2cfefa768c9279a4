"""`ringopt diff`: exit codes, what it prints, the page it writes, and what it says to wrong uses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from ringopt.graph.diff import GraphDiff, NodeView, SiteView, diff_views
from ringopt.tools.cli import main
from ringopt.tools.diff_html import page


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


def test_a_file_and_itself_say_nothing_and_end_with_0(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", files[0], files[0]]) == 0
    assert capsys.readouterr().out == ""


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


def test_json(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", files[0], files[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    assert main(["diff", *files, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["counts"]["replaced"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no.pt2", "SIN"], "no.pt2 does not exist; expected a .pt2 file"),
        (["SIN", "README.md"], "README.md is not a .pt2 file"),
        (["SIN", "tests"], "tests is a folder; expected a .pt2 file"),
        (["SIN", "SIN", "--html", "not/there/a.html"], "cannot write not/there/a.html: No such file or directory"),
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


# ---- the page --------------------------------------------------------------------------------------------------------
def many(layers: int = 2) -> GraphDiff:
    """Layers of one site and ten nodes each; names that would be markup if they reached the page as such."""
    site = SiteView("causal", "none", "none", "none", "", ("#.", "##"))
    before = [NodeView("x", "input", "%x = input x", "x")]
    for layer in range(layers):
        for step in range(10):
            name, last = f"n{layer}_{step}", before[-1].name
            where = f"layers.{layer}.</script><script>alert(1)</script>"
            text = f"%{name} = op{step}(%{last})"
            before.append(NodeView(name, f"op{step}", text, "%", (last,), where, "model.py:1  <b>x</b>", "f32[4]"))
        before[-1] = replace(before[-1], site=site)
    before.append(NodeView("out", "output", f"return %{before[-1].name}", "%", (before[-1].name,)))
    ring = replace(site, strategy="ring", layout="zigzag", kernel="math")
    after = [
        replace(view, op="ring", site=ring, text=f"%{view.name} = ring()") if view.site else view for view in before
    ]
    return diff_views(before, after)


def test_the_page_needs_nothing_from_elsewhere_and_holds_names_as_text() -> None:
    text = page(many(), "a.pt2", "<b>.pt2")
    addresses = set(re.findall(r"""(?:https?:)?//[\w.][^\s"'<`]*""", re.sub(r"\s// .*", "", text)))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>\s]*)""", text) == ["data:,"]
    assert text.count("</script>") == 2
    assert "<b>" not in text


def test_the_page_of_5000_nodes_is_small() -> None:
    assert len(page(many(500), "a.pt2", "b.pt2")) < 4_000_000


PROBE = """
<script>
addEventListener("error", (event) => document.body.setAttribute("data-error", event.message));
addEventListener("securitypolicyviolation", (event) => document.body.setAttribute("data-error", event.blockedURI));
</script>
"""
USE = """
<script>
const said = {};
said.sites = document.querySelectorAll("tr.site").length;
said.closed = document.querySelectorAll(".node").length;
const search = document.getElementById("search");
search.value = "n1_3"; search.dispatchEvent(new Event("input"));
said.found = document.getElementById("found").textContent;
document.dispatchEvent(new KeyboardEvent("keydown", {key: "j"}));
said.focused = document.activeElement.className;
document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
said.open = document.getElementById("site").open;
said.sides = [...document.querySelectorAll("#site-body pre")].map((pre) => pre.textContent);
said.mask = [...document.querySelectorAll("#site-body svg")].map((svg) => svg.children.length);
said.heading = document.querySelector("#site-body h2").textContent;
document.body.setAttribute("data-said", JSON.stringify(said));
</script>
"""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """Sites counted, searched, one opened from the keyboard and its mask read back; no error, no request."""
    file = tmp_path / "page.html"
    text = page(many(), "a.pt2", "b.pt2").replace("<body>", f"<body>{PROBE}").replace("</body>", f"{USE}</body>")
    file.write_text(text)
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", profile, "--dump-dom", file.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    [dump] = re.findall(r'<body([^>]*)data-said="([^"]*)"([^>]*)>', result.stdout)
    assert "data-error" not in dump[0] + dump[2]
    said = json.loads(dump[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert said == {
        "sites": 2,
        "closed": 0,
        "found": "2 nodes shown",
        "focused": "site",
        "open": True,
        "sides": ["%n0_9 = op9(%n0_8)", "%n0_9 = ring()"],
        "mask": [3, 3],
        "heading": "layers.0.</script><script>alert(1)</script>",
    }
