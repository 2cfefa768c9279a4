"""Files with something changed at random: every command ends in one sentence and exit code 2, or reads them."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ringopt
from ringopt.tools.cli import main
from tests.harness.archives import model_of, rewritten, save_small

MOST_SECONDS = 60  # of one file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One as it is exported, and converted."""
    folder = tmp_path_factory.mktemp("good")
    save_small(folder / "good.pt2")
    assert main(["convert", str(folder / "good.pt2"), str(folder / "done.pt2")]) == 0
    return [folder / "good.pt2", folder / "done.pt2"]


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"over {MOST_SECONDS} s")

    old = signal.signal(signal.SIGALRM, ring)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def places(said: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield here
    parts = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    for key, part in parts:
        yield from places(part, (*here, key))


PUT = [None, 7, -1, 2**63, 0.5, "<b>", "ids", "", True, [], {}, [[]], {"as_none": True}, {"as_int": 3}]


def mutated_json(draw: random.Random, said: Any) -> Any:
    """One value deleted, replaced, or exchanged with another of the file."""
    known = list(places(said))[1:]
    place = draw.choice(known)
    holder = said
    for key in place[:-1]:
        holder = holder[key]
    how = draw.random()
    if how < 0.2:
        del holder[place[-1]]
    elif how < 0.7:
        holder[place[-1]] = draw.choice(PUT)
    else:
        other = said
        for key in draw.choice(known):
            other = other[key]
        holder[place[-1]] = json.loads(json.dumps(other))
    return said


def mutated(draw: random.Random, source: Path, target: Path) -> None:
    kind = draw.choice(["bits", "cut", "table", "provenance", "model", "model", "model", "model"])
    if kind in ("bits", "cut"):
        content = bytearray(source.read_bytes())
        for _ in range(draw.choice([1, 1, 3, 20])):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        target.write_bytes(content[: draw.randrange(len(content))] if kind == "cut" else content)
        return
    if kind == "model":
        rewritten(source, target, lambda said: mutated_json(draw, said))
        return
    end = "_config.json" if kind == "table" else "extra/ringopt.json"
    rewritten(source, target, members={end: lambda said: json.dumps(mutated_json(draw, json.loads(said))).encode()})


def ends_well(command: list[str], capsys: pytest.CaptureFixture[str], codes: set[int]) -> None:
    signal.alarm(MOST_SECONDS)
    code = main(command)
    signal.alarm(0)
    said = capsys.readouterr().err
    assert code in codes
    assert "Traceback" not in said
    if code == 2:
        assert said.count("ringopt: error: ") == 1 and said.count("\n") == 1, said


def sweep(
    seeds: range, files: list[Path], folder: Path, commands: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    bad, new = folder / "bad.pt2", folder / "new.pt2"
    arguments = {
        "diff": ["diff", str(files[0]), str(bad), "--stat"],
        "explain": ["explain", str(bad), "--world-size", "2"],
        "convert": ["convert", str(bad), str(new), "--force", "--allow-empty"],
        "verify": ["convert", str(bad), str(new), "--force", "--allow-empty", "--verify"],
    }
    for seed in seeds:
        draw = random.Random(seed)
        source = draw.choice(files)
        mutated(draw, source, bad)
        for command in commands:
            given = arguments[command]
            if command == "explain" and source is files[1]:
                given = given[:2]  # the report that it holds
            try:
                ends_well(given, capsys, {0, 1, 2} if command == "diff" else {0, 2})
            except BaseException:
                bad.rename(folder / f"seed-{seed}.pt2")
                raise


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
def test_diffs_of_mutated_files_end_well(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(range(60), files, tmp_path, ("diff",), capsys)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
def test_other_commands_end_well(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(range(1000, 1008), files, tmp_path, ("explain", "convert"), capsys)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_mutated_files(
    part: int, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = 10_000 + 500 * part
    sweep(range(first, first + 500), files, tmp_path, ("diff", "explain", "convert", "verify"), capsys)


def test_what_is_mutated_is_good(files: list[Path]) -> None:
    for file in files:
        assert model_of(file)
        assert ringopt.load(file)


@pytest.mark.parametrize("found", [{"left_alone": [0.5], "sharded_fraction": 0.0}, {"memory": [1]}, {"sites": [{}]}])
def test_a_report_that_cannot_be_printed(
    found: dict[str, Any], files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In few words or in many, as either is asked for."""

    def changed(said: bytes) -> bytes:
        made = json.loads(said)
        made["report"] |= found
        return json.dumps(made).encode()

    rewritten(files[1], tmp_path / "bad.pt2", members={"extra/ringopt.json": changed})
    ends_well(["explain", str(tmp_path / "bad.pt2")], capsys, {2})
