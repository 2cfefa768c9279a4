"""Plants faults in the engine, one at a time, and shows which the tests notice (mutation testing).

    python -m ringopt.tools.mutate --count 300 --results faults.jsonl
    python -m ringopt.tools.mutate --only ringopt/dims --tests tests/dims tests/sharding

The checkout is copied, so that nothing here changes. One run of the tests records which lines each reaches (package
coverage, kept beside the results and used again); then each fault, drawn evenly over the files, meets the quickest
tests that reach its line, until one fails. A fault that ends in no failure has survived: a test is missing, or the
change means nothing. Exit code 1 if less than --bar of them were noticed.

A fault in a function is planted in a fork of a process that has imported and collected everything (tools/common/
swapped.py). What stands outside of functions is run by the import: such a fault meets a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringopt.tools.common.faults import Fault, faults_of
from ringopt.tools.common.swapped import differing, take_code

ROOMS = "context_parallel cost dims distributed expr ir kernels ops overlap recognize sharding tensor"
ENGINE = ["passes", *(f"ringopt/{room}" for room in ROOMS.split())]
ROOT = Path(__file__).resolve().parents[1]
NOTHING, ENDED, UNFIT = 5, 70, 71  # exit codes: pytest has found no test; an error of this program; not planted
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]


@dataclass(frozen=True)
class Outcome:
    """What became of one fault: `noticed` names the first test that failed, "time" or "collection"; None: survived."""

    file: str
    line: int
    what: str
    noticed: str | None
    tests: int
    seconds: float


def main(words: Sequence[str] | None = None) -> int:
    """Plants faults, prints those that no test found, and returns the exit status."""
    arguments = _parser().parse_args(words)
    results = Path(arguments.results)
    with tempfile.TemporaryDirectory(prefix="ringopt-faults-") as folder:
        copy = _copied(Path(folder) / "checkout")
        reach = _reach(copy, results.with_suffix(".reach.json"), _tests(arguments))
        planting = Planting(copy, reach, results.resolve(), arguments.seconds)
        planting.in_one_session(planting.left(_drawn(arguments)), _tests(arguments))
        for file, fault in planting.left(_drawn(arguments)):
            planting.by_itself(file, fault)
        done = planting.done()
    noticed = sum(one.noticed is not None for one in done)
    share = noticed / max(len(done), 1)
    print(f"{noticed} of {len(done)} faults noticed, {share:.0%}")
    for one in done:
        if one.noticed is None:
            print(f"survived: {one.file}:{one.line}: {one.what}")
    return int(share < arguments.bar)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=ENGINE, metavar="PATH", help="files or folders to plant faults in")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="the tests that may notice")
    parser.add_argument("--sweep", action="store_true", help="tests of the long sweep (-m zoo) may notice too")
    parser.add_argument("--count", type=int, default=300, help="how many faults (300)")
    parser.add_argument("--seed", type=int, default=0, help="which faults are drawn")
    parser.add_argument("--seconds", type=float, default=60, help="time of the tests that meet one fault (60)")
    parser.add_argument("--results", default="faults.jsonl", help="one line of JSON a fault; goes on where it ended")
    parser.add_argument("--bar", type=float, default=0.95, help="share that has to be noticed (0.95)")
    return parser


def _tests(arguments: argparse.Namespace) -> list[str]:
    """The words that tell pytest which tests."""
    return [*arguments.tests, *(["-m", "zoo or not zoo"] if arguments.sweep else [])]


def _copied(to: Path) -> Path:
    """The tracked files of the checkout, links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def _drawn(arguments: argparse.Namespace) -> Iterator[tuple[str, Fault]]:
    """Faults of files drawn at random: a long file does not have most of them."""
    dice = random.Random(arguments.seed)
    files: list[str] = []
    for name in arguments.only:
        found = sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / name]
        files += [str(file.relative_to(ROOT)) for file in found]
    left = {file: list(faults_of((ROOT / file).read_text(encoding="utf-8"))) for file in files}
    for faults in left.values():
        dice.shuffle(faults)
    for _ in range(arguments.count):
        files = [file for file in files if left[file]]
        if not files:
            return
        # Longer files have more turns, but not as many more as they are longer.
        file = dice.choices(files, [len(left[file]) ** 0.5 for file in files])[0]
        yield file, left[file].pop()


class Reach:
    """Which tests reach a line, and how long each takes."""

    def __init__(self, lines: dict[str, dict[str, list[str]]], seconds: dict[str, float]) -> None:
        self.lines = lines
        self.seconds = seconds

    def tests_of(self, file: str, line: int, limit: float) -> list[str]:
        """The quickest tests first, a function at a time by turns, `limit` seconds of them: those of the file's room,
        which have half of that time, its own before others, then those of other rooms.

        A line that only other processes reach (ranks), or the import, has the tests of its room."""
        tests = self.lines.get(file, {}).get(str(line)) or self._of_room(file)
        functions = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds.get(test, 0.0)):
            functions[test.partition("[")[0]].append(test)
        turns = [(turn, test) for cases in functions.values() for turn, test in enumerate(cases)]
        order = sorted((_far(file, test), turn, self.seconds.get(test, 0.0), test) for turn, test in turns)
        chosen: list[str] = []
        total = 0.0
        for far, _, seconds, test in order:
            if not chosen or total + seconds <= (limit if far > 1 else limit / 2):
                total += seconds
                chosen.append(test)
        return chosen

    def _of_room(self, file: str) -> list[str]:
        room = Path(file).parent
        while room.parts:
            folder = _mirror(room)
            if found := [test for test in self.seconds if test.startswith(f"{folder}/")]:
                return found
            room = room.parent
        return list(self.seconds)


def _mirror(room: Path) -> str:
    """The folder with the tests of a room."""
    return str(Path("tests", *(part for part in room.parts if part != "ringopt")))


def _far(file: str, test: str) -> int:
    """How far a test stands from a file: 0 for the one that has its name, 1 within its room."""
    path = Path(test.partition("::")[0])
    if not path.is_relative_to(_mirror(Path(file).parent)):
        return 2
    return int(path.stem != f"test_{Path(file).stem}")


def _reach(copy: Path, kept: Path, tests: Sequence[str]) -> Reach:
    """Runs the tests once with coverage, or reads what an earlier run kept."""
    if not kept.exists():
        code = _forked(copy, lambda: _record(copy, kept.resolve(), tests), None)
        if not kept.exists():
            raise SystemExit(f"the tests did not end with what they reach (exit code {code})")
    return Reach(**json.loads(kept.read_text()))


def _record(copy: Path, kept: Path, tests: Sequence[str]) -> int:
    """In a process of its own: the tests, each a context of coverage."""
    import coverage
    import pytest

    broken: set[str] = set()
    measured = coverage.Coverage(data_file=None, include=[f"{copy}/ringopt/*", f"{copy}/passes/*"], config_file=False)
    seconds: dict[str, float] = {}

    class Plugin:
        def pytest_runtest_setup(self, item: Any) -> None:
            measured.switch_context(item.nodeid)

        def pytest_runtest_logreport(self, report: Any) -> None:
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
            if report.failed:
                broken.add(report.nodeid)

    measured.start()
    code = pytest.main([*PYTEST, "--maxfail=1000", *tests], plugins=[Plugin()])
    measured.stop()
    data = measured.get_data()
    lines: dict[str, dict[str, list[str]]] = {}
    for file in data.measured_files():
        name = str(Path(file).resolve().relative_to(copy.resolve()))
        # A test that fails without a fault would notice every one.
        found = {str(line): sorted({*names} - broken - {""}) for line, names in data.contexts_by_lineno(file).items()}
        lines[name] = {line: names for line, names in found.items() if names}
    sound = {test: duration for test, duration in seconds.items() if test not in broken}
    kept.write_text(json.dumps({"lines": lines, "seconds": sound}))
    return int(code)


class Planting:
    """Plants faults in a copy of the checkout, one at a time. `results` gets a line of each; it is also a plugin of
    pytest, which notes what fails."""

    def __init__(self, copy: Path, reach: Reach, results: Path, limit: float) -> None:
        self.copy, self.reach, self.results, self.limit = copy, reach, results, limit
        self.failed = copy / "failed.log"
        self.shown = os.fdopen(os.dup(1), "w")  # the processes that run tests have another output

    def done(self) -> list[Outcome]:
        """What became of those that were planted, in earlier runs too."""
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        return [Outcome(**json.loads(line)) for line in lines]

    def left(self, drawn: Iterator[tuple[str, Fault]]) -> list[tuple[str, Fault]]:
        """Those of which nothing is known."""
        known = {(one.file, one.line, one.what) for one in self.done()}
        return [(file, fault) for file, fault in drawn if (file, fault.line, fault.what) not in known]

    def in_one_session(self, faults: Sequence[tuple[str, Fault]], tests: Sequence[str]) -> None:
        """Those in functions, in forks of one process."""
        import pytest

        class Forks:
            @staticmethod
            def pytest_runtestloop(session: Any) -> bool:
                items = {item.nodeid: item for item in session.items}
                for file, fault in faults:
                    self.in_a_fork(file, fault, items)
                return True

        _forked(self.copy, lambda: int(pytest.main([*PYTEST, *tests], plugins=[Forks(), self])), None)

    def in_a_fork(self, file: str, fault: Fault, items: Mapping[str, Any]) -> None:
        """Nothing is planted where more than functions would change."""
        before = (self.copy / file).read_text(encoding="utf-8")
        if differing(compile(before, file, "exec"), compile(fault.source, file, "exec")) is None:
            return
        chosen = [items[test] for test in self.reach.tests_of(file, fault.line, self.limit) if test in items]

        def work() -> int:
            return self.until_one_fails(chosen) if take_code(before, fault.source, file) else UNFIT

        self.planted(file, fault, len(chosen), lambda limit: _forked(self.copy, work, limit, anew=False))

    def until_one_fails(self, items: Sequence[Any]) -> int:
        """Runs tests that are collected."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed.exists():
                return 1
        return 0

    def by_itself(self, file: str, fault: Fault) -> None:
        """Any, in a process that imports all anew."""
        import pytest

        tests = self.reach.tests_of(file, fault.line, self.limit)

        def work() -> int:
            return int(pytest.main([*PYTEST, "-m", "zoo or not zoo", *tests], plugins=[self]))

        self.planted(file, fault, len(tests), lambda limit: _forked(self.copy, work, limit))

    def planted(self, file: str, fault: Fault, tests: int, run: Callable[[float], int | None]) -> None:
        """Writes the fault, runs tests, and takes the fault away again."""
        before = (self.copy / file).read_text(encoding="utf-8")
        self.failed.unlink(missing_ok=True)
        start = time.monotonic()
        (self.copy / file).write_text(fault.source, encoding="utf-8")
        try:
            code = run(5 * self.limit + 60)
        finally:
            (self.copy / file).write_text(before, encoding="utf-8")
        if code == UNFIT:
            return
        if code in (NOTHING, ENDED):
            raise SystemExit(f"{file}:{fault.line}: {fault.what}: the tests did not run (exit code {code})")
        failed = self.failed.read_text() if self.failed.exists() else "collection"
        noticed = None if code == 0 else "time" if code is None else failed
        outcome = Outcome(file, fault.line, fault.what, noticed, tests, round(time.monotonic() - start, 1))
        with self.results.open("a") as log:
            log.write(json.dumps(asdict(outcome)) + "\n")
        verdict = outcome.noticed or f"SURVIVED {outcome.tests} tests"
        print(f"{file}:{fault.line}: {fault.what}: {verdict} ({outcome.seconds:.0f} s)", file=self.shown, flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of pytest."""
        if report.failed and not self.failed.exists():
            self.failed.write_text(report.nodeid)


def _forked(copy: Path, work: Callable[[], int], limit: float | None, anew: bool = True) -> int | None:
    """Runs `work` in a fork, which has torch imported already, in the copy; ringopt and its tests are to be imported
    `anew`. Gives its exit code; None: out of time."""
    import torch  # noqa: F401  (once, for all forks)

    child = os.fork()
    if child == 0:
        code, shown = ENDED, os.fdopen(os.dup(2), "w")
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.chdir(copy)
            if anew:
                sys.path.insert(0, str(copy))
                os.environ["PYTHONPATH"] = str(copy)
                for name in [name for name in sys.modules if name.partition(".")[0] in ("ringopt", "tests")]:
                    del sys.modules[name]
            code = work()
        except BaseException:
            traceback.print_exc(file=shown)
        finally:
            shown.flush()
            os._exit(code)
    end = None if limit is None else time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if end is not None and time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.1)
    _end_group(child)
    return os.waitstatus_to_exitcode(status)


def _end_group(leader: int) -> None:
    """Ranks that a failed test left behind."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
