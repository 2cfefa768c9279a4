"""Graphs out of TORCH_TRACE: what others' programs leave behind, read without running it."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ringopt
from ringopt.compare.trace_files import views_of_trace
from ringopt.errors import ProgramError

LOG = """\
V1123 10:30:37.228000 22749 torch/_dynamo/output_graph.py:2841] {"dynamo_output_graph": {}, "has_payload": "1"}
\tclass GraphModule(torch.nn.Module):
\t    def forward(self, L_x_: "f32[2, 8, 16][128, 16, 1]cpu", L_w_: "f32[4, 16][16, 1]cpu"):
\t        l_x_ = L_x_
\t        w = L_w_
\t
\t        # File: /home/me/model.py:7 in forward, code: y = F.linear(x, w)
\t        y: "f32[2, 8, 4][32, 4, 1]cpu" = torch._C._nn.linear(l_x_, w, bias = None);  l_x_ = w = None
\t        q: "f32[2, 4, 8][32, 1, 4]cpu" = y.transpose(1, 2)
\t        z: "f32[2, 8, 8][64, 8, 1]cpu" = y @ q;  y = q = None
\t        out: "f32[2, 8, 8][64, 8, 1]cpu" = torch.ops.mylib.OP.default(z, [1, 2]);  z = None
\t        return (out,)
V1123 10:30:37.300000 22749 torch/x.py:1] {"artifact": {"name": "dynamo_output_graph"}, "has_payload": "2"}
\tnothing of Python
"""


def traced(folder: Path, op: str = "f") -> Path:
    folder.mkdir()
    (folder / "dedicated_log_torch_trace_abc.log").write_text(LOG.replace("OP", op))
    return folder


def test_nodes_have_operators_operands_shapes_lines_and_figures(tmp_path: Path) -> None:
    x, w, y, q, z, out, end = views_of_trace(traced(tmp_path / "a"))
    assert (x.op, w.text, x.result_bytes, x.device) == ("input", "%L_w_ = input L_w_", 1024, "cpu")
    assert y.text == "%y = linear(%L_x_, %L_w_, bias=None)" and y.inputs == ("L_x_", "L_w_")
    assert (y.shape, y.flops, y.source) == ("f32[2, 8, 4]", 2 * 64 * 16, "model.py:7  y = F.linear(x, w)")
    assert y.path == "/home/me/model.py:7"
    assert (q.text, q.flops) == ("%q = transpose(%y, 1, 2)", 0)
    assert (z.op, z.flops, z.inputs) == ("matmult", 2 * 128 * 4, ("y", "q"))
    assert (out.op, out.arguments, end.text) == ("mylib::f", "%, [1, 2]", "return (%out,)")


def test_two_traces_are_compared(tmp_path: Path) -> None:
    one, other = traced(tmp_path / "a"), traced(tmp_path / "b", "g")
    diff = ringopt.diff(one, f"{other}#dynamo_output_graph")
    [change] = [change for change in diff.changes if change.kind != "same"]
    assert (change.kind, change.node.name) == ("replaced", "out")
    assert diff.before.flops == diff.after.flops == 2 * 64 * 16 + 2 * 128 * 4


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    folder = traced(tmp_path / "a")
    with pytest.raises(ProgramError, match=r"holds no graph aot_forward_graph; graphs of it: dynamo_output_graph"):
        ringopt.diff(f"{folder}#aot_forward_graph", folder)
    with pytest.raises(ProgramError, match=r"is a trace, which cannot be run"):
        ringopt.diff(folder, folder, inputs="random")
    (log,) = folder.iterdir()
    log.write_text(LOG.replace("def forward", "def for ward"))
    with pytest.raises(ProgramError, match=r"a dynamo_output_graph cannot be read: invalid syntax"):
        ringopt.diff(folder, folder)


def test_flops_that_only_torch_counts() -> None:
    """The backward of a convolution is no operator of a forward, which is what ringopt counts."""
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("grad", "x", "w")]
    for node, size in zip(given, ((1, 4, 6), (1, 4, 8), (4, 4, 3)), strict=True):
        node.meta["val"] = torch.empty(size, device="meta")
    op = torch.ops.aten.convolution_backward.default
    made = graph.call_function(op, (*given, [4], [1], [0], [1], False, [0], 1, [True, True, True]))
    made.meta["val"] = tuple(torch.empty(size, device="meta") for size in ((1, 4, 8), (4, 4, 3), (4,)))
    graph.output(made)
    gm = torch.fx.GraphModule(nn.Module(), graph)
    [view] = [change.after for change in ringopt.diff(gm, gm).changes if change.node.op == "convolution_backward"]
    assert view is not None and view.flops == 2 * 2 * 4 * 6 * 4 * 3
    assert view.result_bytes == 4 * (32 + 48 + 4)


@pytest.mark.parametrize(
    ("function", "sizes", "flops"),
    [
        (torch.matmul, ((2, 3, 4), (4, 5), (2, 3, 5)), 240),
        (operator.matmul, ((3, 4), (4, 5), (3, 5)), 120),
        (nn.functional.linear, ((3, 4), (5, 4), (3, 5)), 120),
        (nn.functional.conv1d, ((1, 2, 8), (3, 2, 5), (1, 3, 4)), 240),
        (nn.functional.scaled_dot_product_attention, ((1, 1, 4, 8),) * 4, 512),
        (torch.tensordot, ((3, 4), (4, 5), (3, 5)), None),
        (torch.relu, ((3, 4), (3, 4)), 0),
        (torch.matmul, ((), (), ()), None),
    ],
)  # fmt: skip
def test_flops_of_functions_that_python_calls(
    function: Callable[..., Any], sizes: tuple[tuple[int, ...], ...], flops: int | None
) -> None:
    """As a symbolic trace has them, with the sizes that were noted, or none."""
    graph = torch.fx.Graph()
    made = graph.call_function(function, tuple(graph.placeholder(f"x{number}") for number in range(len(sizes) - 1)))
    if sizes[0]:
        for node, size in zip(graph.nodes, (*sizes[:-1], sizes[-1]), strict=True):
            node.meta["val"] = torch.empty(size, device="meta")
    graph.output(made)
    gm = torch.fx.GraphModule(nn.Module(), graph)
    diff = ringopt.diff(gm, gm)
    assert diff.same and diff.before.flops == flops


@pytest.mark.zoo
def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    code = (
        "import torch, sys; m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8));"
        "torch.compile(m, backend='aot_eager')(torch.zeros(2, 8)).sum().backward()"
    )
    for name, text in (("a", code), ("b", code.replace("ReLU", "GELU"))):
        traces = {**os.environ, "TORCH_TRACE": str(tmp_path / name)}
        subprocess.run([sys.executable, "-c", text], env=traces, check=True)
    for kind, count in (("dynamo_output_graph", 9), ("aot_backward_graph", None)):
        diff = ringopt.diff(f"{tmp_path / 'a'}#{kind}", f"{tmp_path / 'b'}#{kind}")
        assert not diff.same and diff.before.flops
        assert count is None or diff.before.nodes == count
