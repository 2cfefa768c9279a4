"""Fixtures of all tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config

from ringopt.drivers import failing
from ringopt.tools.benchmarks.lab import link_lab
from tests.harness.pool import POOL, fork_server
from tests.harness.rank import collect_rarely, compile_without_measuring
from tests.harness.sampling import mark_what_is_swept

# pytest listens to every logger that does not propagate, and torch writes out each graph, at each stage, as soon as
# anybody listens to its trace: that was a third of the time of all tests.
logging.getLogger("torch.__trace").propagate = True


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start processes come first, so that one of several workers has most of them: in each worker
    that has any, a fork server imports torch, and its ranks compile for the first time. What runs longest, and by
    itself, is begun before all."""
    mark_what_is_swept(items)
    forking = {item.path for item in items if "ranks" in getattr(item, "fixturenames", ())}
    forking |= {item.path for item in items if item.path.stem.startswith(("test_bench", "test_link_lab"))}
    items.sort(key=lambda item: (item.path.stem != "test_static", item.path not in forking))


def pytest_collection_finish() -> None:
    collect_rarely()
    compile_without_measuring()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests share the machine with the ranks they start."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_compile_workers() -> Iterator[None]:
    """Inductor compiles in the process that asks, here and in processes that tests start: a pool of workers imports
    torch once more for each. The vector instructions that the processor lists are not tried out by each process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        patched.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        patched.setattr(torch._inductor.config, "compile_threads", 1)
        patched.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
        yield


@pytest.fixture(autouse=True)
def errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that fails would leave its graph as it was, and what is compared would be right."""
    monkeypatch.setattr(failing, "RAISES", True)


@pytest.fixture(scope="session", autouse=True)
def no_terminal() -> Iterator[None]:
    """How wide tables are in a log, and options that are not named, do not depend on who runs the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("COLUMNS", raising=False)
        patched.delenv("RINGOPT_OPTIONS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured on this machine would change which strategies are chosen."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_benchmarks() -> Iterator[None]:
    """The ranks of benchmarks come from the fork server too: torch is not imported anew for each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link_lab, "context", fork_server)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`ranks(p, function, *args, timeout=120) -> [result of each rank]`: see tests/harness/pool.py."""
    yield POOL.run
    POOL.close()
