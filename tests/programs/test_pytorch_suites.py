"""The driver of PyTorch's own tests: on a small file of the same kind, and on those of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ringopt
from tests.programs.pytorch_suites import (
    CRASHED,
    NOT_OURS,
    RIGHT,
    SKIPPED,
    WRONG,
    Outcome,
    Ranks,
    reasons,
    run_file,
    table,
)

ROOT = Path(__file__).parents[2]

SUITE = """
import unittest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck
from torch.testing._internal.inductor_utils import GPU_TYPE


def attention(q, k, v):
    return (q @ k.mT / 2).softmax(-1) @ v


class Suite(unittest.TestCase):
    def given(self):
        return [torch.randn(1, 2, 9, 4, dtype=torch.float64, device=GPU_TYPE) for _ in range(3)]

    def test_asks_of_inductor(self):
        given = self.given()
        out, code = run_and_get_code(torch.compile(attention, fullgraph=True, mode="max-autotune"), *given)
        self.assertEqual(counters["inductor"]["fuse_attention"], 1)
        self.assertIn("aten._scaled_dot_product", "\\n".join(code))
        FileCheck().check("kernel").check_not("other").run(code[0])
        torch.testing.assert_close(out, attention(*given))

    def test_counts_compilations(self):
        counter, given = CompileCounterWithBackend("inductor"), self.given()
        for each in (given, [x[:, :, :7] for x in given]):
            out = torch.compile(attention, backend=counter, dynamic=False)(*each)
            torch.testing.assert_close(out, attention(*each))
        self.assertEqual(counter.frame_count, 1)

    def test_is_left_alone(self):
        given = self.given()
        look_alike = lambda q, k, v: (q @ k.mT).softmax(-2).square() @ v
        torch.testing.assert_close(torch.compile(look_alike)(*given), look_alike(*given))

    def test_has_inputs_of_its_own_on_each_rank(self):
        torch.manual_seed(dist.get_rank())
        torch.compile(attention)(*self.given())

    def test_is_wrong_on_any_backend(self):
        given = self.given()
        self.assertTrue((torch.compile(attention)(*given) == 0).all())

    def test_draws_from_the_stream_of_torch(self):
        given, out = self.given(), []
        for dropped in (lambda *given: F.dropout(attention(*given)),) * 2:
            torch.manual_seed(0)
            out.append((torch.compile(dropped) if out else dropped)(*given))
        torch.testing.assert_close(*out)

    @unittest.skip("needs two GPUs")
    def test_needs_gpus(self):
        pass
"""


def outcomes(path: Path, store: str) -> list[Outcome]:
    ranks = Ranks(dist.FileStore(store), dist.get_rank(), dist.get_world_size())
    with ringopt.defaults(inner_backend="eager", on_refusal="ignore"):
        return run_file(ranks, path, "")


def test_each_test_is_counted_as_what_it_is(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "test_small.py"
    path.write_text(SUITE)
    for each in ranks(2, outcomes, path, str(tmp_path / "store")):
        found = {outcome.name.removeprefix("Suite.test_"): outcome for outcome in each}
        assert {name: outcome.what for name, outcome in found.items()} == {
            "asks_of_inductor": RIGHT,
            "counts_compilations": RIGHT,
            "is_left_alone": RIGHT,
            "has_inputs_of_its_own_on_each_rank": CRASHED,
            "is_wrong_on_any_backend": NOT_OURS,
            "draws_from_the_stream_of_torch": WRONG,
            "needs_gpus": SKIPPED,
        }
        assert (found["asks_of_inductor"].sharded, found["counts_compilations"].sharded) == (1, 2)
        assert [name for name, outcome in found.items() if outcome.recompiled] == ["counts_compilations"]
        assert (found["is_left_alone"].sharded, found["is_left_alone"].refused) == (0, 1)
        assert found["needs_gpus"].detail == "needs two GPUs"
        assert "RingMismatchError" in found["has_inputs_of_its_own_on_each_rank"].detail


def test_the_table_counts_attentions_of_what_is_right() -> None:
    found = [
        Outcome("a", RIGHT, recompiled=True, sharded=2, by_rows=1, reasons=("top-k",)),
        Outcome("b", WRONG, "Tensors are not close", sharded=4),
        Outcome("c", RIGHT, sharded=1, refused=3, whole=1, reasons=("top-k", "whole graph: a view")),
    ]
    assert list(table({"test.py": found}))[-1] == "| test.py | 3 | 2 | 1 | 0 | 0 | 0 | 1 | 3 | 1 | 3 | 1 |"
    assert list(reasons(found)) == [
        "\nb: wrong number\nTensors are not close",
        "not sharded, 2 times: top-k",
        "not sharded, 1 times: whole graph: a view",
    ]


@pytest.mark.zoo
@pytest.mark.skipif("RINGOPT_PYTORCH" not in os.environ, reason="RINGOPT_PYTORCH names no checkout of PyTorch")
@pytest.mark.timeout(7200)
def test_pytorch_s_own_tests_are_right() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run((*torchrun, "-m", "tests.programs.pytorch_suites"), cwd=ROOT, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
