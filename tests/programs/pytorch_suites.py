"""PyTorch's own tests of attention, run on p ranks through backend="ring".

    RINGOPT_PYTORCH=CHECKOUT torchrun --nproc-per-node 2 -m tests.programs.pytorch_suites [-k PATTERN] [FILE ...]

The files are unittest modules of a checkout of PyTorch; nothing of it is in this repository. What they compile for
Inductor is compiled for `ring`, and what they ask of Inductor's generated code and counters counts as so. Numbers are
compared as the tests compare them, on every rank. A test that fails runs again with backend="aot_eager": where it fails
there too, the failure is not ringopt's. The exit code is 1 if any other test fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal import common_cuda, inductor_utils

import ringopt
from ringopt.backend import ring
from ringopt.distributed.mesh import forget_all

SUITES = ("test/inductor/test_fused_attention.py", "test/inductor/test_flex_attention.py")
PATIENCE = 120  # seconds until a rank that went another way is an error

# From best to worst; a test is as bad as on its worst rank.
RIGHT, SKIPPED, NOT_OURS, CRASHED, WRONG = "right", "skipped", "fails in aot_eager too", "crashed", "wrong number"
ORDER = (SKIPPED, RIGHT, NOT_OURS, CRASHED, WRONG)


@dataclass(frozen=True)
class Outcome:
    """Of one test on one rank. `recompiled`: the test expects fewer compilations. `sharded`, `by_rows` (keys and values
    gathered) and `refused` count attentions, `whole` counts graphs left as they were; `reasons` why not sharded."""

    name: str
    what: str
    detail: str = ""
    recompiled: bool = False
    sharded: int = 0
    by_rows: int = 0
    refused: int = 0
    whole: int = 0
    reasons: tuple[str, ...] = ()


# ---- what the tests ask of Inductor ----------------------------------------------------------------------------------
GENERATED = "nothing was generated: Inductor did not compile this"


class Satisfied:
    """In place of Inductor's counters: each is what a test expects it to be."""

    def __getitem__(self, _: Any) -> Satisfied:
        return self

    def clear(self) -> None:
        """As a counter is cleared."""


class Compilations(int):
    """Of a backend that counts them. What a test expects of them is no number of its program: `too_many` holds the
    tests that expect fewer."""

    too_many: ClassVar[list[str]] = []

    def __add__(self, more: int) -> Compilations:
        return Compilations(int(self) + more)


def same_call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """In place of `run_and_get_code`."""
    torch._dynamo.reset()
    return fn(*args, **kwargs), [GENERATED]


class FileCheck:
    """In place of the one that reads generated source."""

    def __getattr__(self, _: str) -> Callable[..., FileCheck]:
        return lambda *args: self


def unless_satisfied(check: Callable[..., None]) -> Callable[..., None]:
    """`check` of unittest, but not of Inductor's counters and code."""

    def checked(self: unittest.TestCase, *args: Any, **kwargs: Any) -> None:
        if isinstance(args[0], Compilations):
            Compilations.too_many += [self.id()] * (args[0] > args[1])
        elif not any(isinstance(x, Satisfied) or (isinstance(x, str) and GENERATED in x) for x in args):
            check(self, *args, **kwargs)

    return checked


def without_inductor(module: ModuleType) -> None:
    """The names of `module` that lead to generated source and counters."""
    in_place = {"run_and_get_code": same_call, "counters": Satisfied(), "FileCheck": FileCheck}
    for name in in_place.keys() & vars(module).keys():
        setattr(module, name, in_place[name])
    for case in vars(module).values():
        if isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == module.__name__:
            for name in ("assertIn", "assertNotIn", "assertEqual", "assertGreaterEqual"):
                setattr(case, name, unless_satisfied(getattr(unittest.TestCase if "In" in name else case, name)))


@contextmanager
def compiled_for(backend: str, modules: Sequence[str]) -> Iterator[None]:
    """What `modules` compile for Inductor is compiled for `backend`; flex_attention itself compiles in eager too."""
    genuine = torch.compile

    def compile(model: Any = None, **asked: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") in modules:
            asked.pop("mode", None), asked.pop("options", None)
            counting = asked.get("backend", "inductor")
            if counting == "inductor":
                asked["backend"] = backend
            elif isinstance(counting, CompileCounterWithBackend) and counting.backend == "inductor":
                counting.backend = ring if backend == "ring" else backend
                counting.frame_count = Compilations(counting.frame_count)
        return genuine(model, **asked)

    with mock.patch.object(torch, "compile", compile):
        yield


@contextmanager
def cpu_as_gpu() -> Iterator[None]:
    """Where no GPU is, tests that only place tensors on one place them on the CPU."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(inductor_utils, "GPU_TYPE", "cpu"))
            stack.enter_context(mock.patch.object(inductor_utils, "HAS_CUDA_AND_TRITON", True))
            stack.enter_context(mock.patch.object(common_cuda, "PLATFORM_SUPPORTS_FUSED_ATTENTION", True))
        yield


# ---- one test --------------------------------------------------------------------------------------------------------
def tests_of(path: Path) -> tuple[str, list[unittest.TestCase]]:
    """The name of the module at `path`, and its tests."""
    name = f"pytorch_suite_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with cpu_as_gpu():
        spec.loader.exec_module(module)
    without_inductor(module)
    return name, list(flat(unittest.defaultTestLoader.loadTestsFromModule(module)))


def flat(suite: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        yield suite
    else:
        for each in suite:
            yield from flat(each)


def run(test: unittest.TestCase, backend: str, module: str) -> Outcome:
    """`test`, compiled for `backend`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    before, result = len(ringopt.reports()), unittest.TestResult()
    with compiled_for(backend, [module]):
        unittest.TestSuite([test]).run(result)
    reports = ringopt.reports()[before:]
    sites = [site for report in reports for site in report.sites]
    left = [reason for report in reports for reason in report.left_alone]
    refused = [site.refusal for site in sites if site.refusal is not None and not site.by_rows]
    whole = [f"whole graph: {report.refusal}" for report in reports if report.refusal is not None]
    by_rows = [site.refusal for site in sites if site.by_rows]
    return Outcome(
        test.id().removeprefix(f"{module}."),
        *verdict(result),
        recompiled=test.id() in Compilations.too_many,
        sharded=sum(site.refusal is None for site in sites),
        by_rows=len(by_rows),
        refused=len(refused) + len(left),
        whole=len(whole),
        reasons=(*filter(None, by_rows), *refused, *left, *whole),
    )


def verdict(result: unittest.TestResult) -> tuple[str, str]:
    """What came out, and why."""
    if result.failures:
        return WRONG, result.failures[0][1]
    if result.errors:
        return CRASHED, result.errors[0][1]
    if result.skipped:
        return SKIPPED, result.skipped[0][1]
    if result.expectedFailures:
        return SKIPPED, "expected to fail"
    return (CRASHED, "succeeds, which the suite does not expect") if result.unexpectedSuccesses else (RIGHT, "")


# ---- all ranks -------------------------------------------------------------------------------------------------------
class Ranks:
    """All ranks, which meet at `store`. Verdicts travel through it, for a group that a failed test has used is left."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.groups = self.exchanged = 0
        self.group()

    def group(self) -> None:
        """A process group that carried nothing yet."""
        forget_all()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.groups += 1
        store = dist.PrefixStore(f"group {self.groups}", self.store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def worst(self, what: str) -> str:
        """Of all ranks."""
        self.exchanged += 1
        self.store.set(f"verdict {self.exchanged} of {self.rank}", what)
        given = [self.store.get(f"verdict {self.exchanged} of {rank}").decode() for rank in range(self.size)]
        return max(given, key=ORDER.index)


def run_on_all(ranks: Ranks, test: unittest.TestCase, module: str) -> Outcome:
    """`test` through `ring`; where that fails, what it does without."""
    outcome = run(test, "ring", module)
    what = ranks.worst(outcome.what)
    if what in (WRONG, CRASHED):
        ranks.group()
        alone = run(test, "aot_eager", module)
        if ranks.worst(alone.what) in (WRONG, CRASHED):
            return replace(outcome, what=NOT_OURS, detail=first_error(alone.detail))
    return replace(outcome, what=what, detail=outcome.detail or "on another rank")


def first_error(trace: str) -> str:
    """The line that says what was wrong, without the calls that led to it."""
    found = re.search(r"^\w[\w.]*(Error|Exception)\b.*", trace, re.MULTILINE)
    return found[0] if found else trace


def run_file(ranks: Ranks, path: Path, chosen: str) -> list[Outcome]:
    """All tests of a file whose names match `chosen`."""
    module, tests = tests_of(path)
    outcomes = []
    for test in tests:
        if re.search(chosen, test.id()):
            started = time.monotonic()
            outcomes.append(outcome := run_on_all(ranks, test, module))
            if ranks.rank == 0:
                print(f"{outcome.name}: {outcome.what} ({time.monotonic() - started:.1f} s)", flush=True)
    return outcomes


# ---- what is shown ---------------------------------------------------------------------------------------------------
def table(by_file: dict[str, list[Outcome]]) -> Iterator[str]:
    """Markdown: counts of tests, then of those that are right: which compile more than they expect, and attentions."""
    kinds = (RIGHT, WRONG, CRASHED, NOT_OURS, SKIPPED)
    columns = (
        "file",
        "tests",
        *kinds,
        "recompiled",
        "attentions sharded",
        "K and V gathered",
        "refused",
        "graphs whole",
    )
    yield "| " + " | ".join(columns) + " |"
    yield "| --- |" + " ---: |" * (len(columns) - 1)
    for name, outcomes in by_file.items():
        counts = Counter(outcome.what for outcome in outcomes)
        right = [outcome for outcome in outcomes if outcome.what == RIGHT]
        sums = [
            sum(getattr(each, of) for each in right) for of in ("recompiled", "sharded", "by_rows", "refused", "whole")
        ]
        cells = [len(outcomes), *(counts[kind] for kind in kinds), *sums]
        yield f"| {name} | " + " | ".join(f"{cell:,}" for cell in cells) + " |"


def reasons(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Why tests are not right and attentions not sharded, the most frequent reasons first."""
    for outcome in outcomes:
        if outcome.what not in (RIGHT, SKIPPED):
            yield f"\n{outcome.name}: {outcome.what}\n{outcome.detail}"
    for title, of in (
        ("skipped", [outcome.detail for outcome in outcomes if outcome.what == SKIPPED]),
        ("not sharded", [reason for outcome in outcomes for reason in outcome.reasons]),
    ):
        yield from (f"{title}, {times} times: {reason}" for reason, times in Counter(of).most_common())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.pytorch_suites")
    parser.add_argument("files", nargs="*", default=SUITES, help="below RINGOPT_PYTORCH")
    parser.add_argument("-k", dest="chosen", default="", help="only tests whose name matches this regular expression")
    asked = parser.parse_args(arguments)
    root = Path(os.environ["RINGOPT_PYTORCH"])
    torch.set_num_threads(1)
    ranks = Ranks(*next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=2 * PATIENCE)))))
    with ringopt.defaults(inner_backend="aot_eager", timeout=PATIENCE, on_refusal="ignore"):
        by_file = {name: run_file(ranks, root / name, asked.chosen) for name in asked.files}
    every = [outcome for outcomes in by_file.values() for outcome in outcomes]
    if ranks.rank == 0:
        print("", *reasons(every), "", *table(by_file), sep="\n")
    dist.destroy_process_group()
    return int(any(outcome.what in (WRONG, CRASHED) for outcome in every))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
