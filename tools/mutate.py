"""Plants faults in the engine, one at a time, and shows which the tests notice (mutation testing).

    python -m ringopt.tools.mutate --count 300 --results faults.jsonl
    python -m ringopt.tools.mutate --only ringopt/dims --tests tests/dims tests/sharding

The checkout is copied, so that nothing here changes. One run of the tests records which lines each reaches (package
coverage, kept beside the results and used again); then each fault, drawn evenly over the files, meets the quickest
tests that reach its line, until one fails. A fault that ends in no failure has survived: a test is missing, or the
change means nothing. Exit code 1 if less than --bar of them were noticed.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringopt.tools.common.faults import Fault, faults_of

ROOMS = "context_parallel cost dims distributed expr ir kernels ops overlap recognize sharding tensor"
ENGINE = ["passes", *(f"ringopt/{room}" for room in ROOMS.split())]
ROOT = Path(__file__).resolve().parents[1]
NOTHING, ENDED = 5, 70  # exit codes: pytest has found no test; an error of this program
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
        reach = _reach(copy, results.with_suffix(".reach.json"), arguments.tests)
        done = [Outcome(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []
        known = {(one.file, one.line, one.what) for one in done}
        drawn = [one for one in _drawn(arguments) if (one[0], one[1].line, one[1].what) not in known]
        for number, (file, fault) in enumerate(drawn, len(done) + 1):
            tests = reach.tests_of(file, fault.line, arguments.seconds)
            outcome = _planted(copy, file, fault, tests, arguments.seconds)
            done.append(outcome)
            with results.open("a") as log:
                log.write(json.dumps(asdict(outcome)) + "\n")
            verdict = outcome.noticed or f"SURVIVED {outcome.tests} tests"
            print(f"{number}: {file}:{fault.line}: {fault.what}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
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
    parser.add_argument("--count", type=int, default=300, help="how many faults (300)")
    parser.add_argument("--seed", type=int, default=0, help="which faults are drawn")
    parser.add_argument("--seconds", type=float, default=60, help="time of the tests that meet one fault (60)")
    parser.add_argument("--results", default="faults.jsonl", help="one line of JSON a fault; goes on where it ended")
    parser.add_argument("--bar", type=float, default=0.95, help="share that has to be noticed (0.95)")
    return parser


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
        """The quickest tests first, a function at a time by turns, `limit` seconds of them.

        A line that only other processes reach (ranks), or the import, has the tests of its room."""
        tests = self.lines.get(file, {}).get(str(line)) or self._of_room(file)
        functions = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds.get(test, 0.0)):
            functions[test.partition("[")[0]].append(test)
        turns = [(turn, test) for cases in functions.values() for turn, test in enumerate(cases)]
        chosen: list[str] = []
        total = 0.0
        for _, test in sorted(turns, key=lambda one: (one[0], self.seconds.get(one[1], 0.0))):
            total += self.seconds.get(test, 0.0)
            if total > limit and chosen:
                break
            chosen.append(test)
        return chosen

    def _of_room(self, file: str) -> list[str]:
        room = Path(file).parent
        while room.parts:
            folder = str(Path("tests", *(part for part in room.parts if part != "ringopt")))
            if found := [test for test in self.seconds if test.startswith(f"{folder}/")]:
                return found
            room = room.parent
        return list(self.seconds)


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


def _planted(copy: Path, file: str, fault: Fault, tests: Sequence[str], limit: float) -> Outcome:
    """Writes the fault, runs the tests in a process of their own, and takes the fault away again."""
    import pytest

    before = (copy / file).read_text(encoding="utf-8")
    log = copy / "fault.log"
    log.unlink(missing_ok=True)
    start = time.monotonic()

    class Plugin:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                log.write_text(report.nodeid)

    (copy / file).write_text(fault.source, encoding="utf-8")
    try:
        code = _forked(copy, lambda: int(pytest.main([*PYTEST, *tests], plugins=[Plugin()])), 5 * limit + 60)
    finally:
        (copy / file).write_text(before, encoding="utf-8")
    if code in (NOTHING, ENDED):
        raise SystemExit(f"{file}:{fault.line}: {fault.what}: the tests did not run (exit code {code})")
    noticed = None if code == 0 else log.read_text() if log.exists() else "time" if code is None else "collection"
    return Outcome(file, fault.line, fault.what, noticed, len(tests), round(time.monotonic() - start, 1))


def _forked(copy: Path, work: Callable[[], int], limit: float | None) -> int | None:
    """Runs `work` in a fork, which has torch imported already, in the copy. Gives its exit code; None: out of time."""
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
