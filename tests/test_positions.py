"""Nobody counts the positions of arguments of ringopt's operators but ringopt/calls.py: they are read and written by
the names of the schema, so an operator may be given another argument in one place."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F

from ringopt.drivers.compile import transform
from ringopt.ops.traits import attends, traits_of
from ringopt.options import Options
from ringopt.overlap.async_collectives import Budget
from ringopt.overlap.start_early import order
from tests.harness.translation import Seat, captured
from tests.structure import parsed

ROOT = Path(__file__).parent.parent
FOLDERS = ("ringopt", "passes", "tools")

# Here all nodes that are looked at are of ringopt's operators, or are results of those.
OURS = [*(ROOT / "ringopt/overlap").glob("*.py"), *(ROOT / "ringopt/reporting").glob("*.py")]
OURS += [ROOT / f"passes/{name}.py" for name in ("schedule", "sync_gradients", "lower", "strip_repeat_kv", "dilate")]
OURS += [ROOT / f"ringopt/{name}.py" for name in ("drivers/convert", "sharding/sites", "planner/trace_model")]

# What is an element of a tuple (`getitem`), an output of a graph, or an operand of any product.
NOT_OURS = {
    "user.args[1]", "part.args[1]", "node.args[0], operand", "graph.output_node().args[0]", "output.args[0]",
}  # fmt: skip

NAMES = {"to", "of_half", "over_ranks", "find_nodes"}  # take an operator and names; the others would take positions


def indexed(tree: ast.AST) -> Iterator[ast.expr]:
    """`node.args[1]`, and what `node.args` is unpacked in."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Subscript) and is_args(each.value):
            yield each
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Tuple):
            yield from filter(is_args, each.value.elts if isinstance(each.value, ast.Tuple) else [each.value])


def is_args(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "args"


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_argument_is_read_by_its_position(path: Path) -> None:
    lines = path.read_text().splitlines()
    found = [lines[each.lineno - 1].strip() for each in indexed(parsed(path.read_text()))]
    assert [line for line in found if not any(other in line for other in NOT_OURS)] == []


def by_position(tree: ast.AST) -> Iterator[ast.Call]:
    """`emit(graph, operators.gather.default, (x, 1), like)`: an operator handed on together with positions."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and any(map(is_operator, call.args)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            others = [arg.value if isinstance(arg, ast.Starred) else arg for arg in call.args if not is_operator(arg)]
            if name not in NAMES and not any(map(is_args, others)):
                yield call


def is_operator(node: ast.expr) -> bool:
    """`operators.gather.default`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node).startswith("operators.")


def test_no_operator_is_written_with_positions() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for call in by_position(parsed(path.read_text()))
    ]
    assert found == []


def test_what_is_looked_for_is_found() -> None:
    read = ast.parse("x, y = node.args\na = node.args[2]\nb, (c, d) = 1, node.args")
    written = ast.parse("emit(g, operators.gather.default, (x, 1), y)\nemit(operators.gather.default, *call.args)")
    assert len(list(indexed(read))) == 3 and len(list(by_position(written))) == 1


# ---- while programs are compiled ---------------------------------------------------------------------------------
class Program(nn.Module):
    """Attention with and without a mask, repeated heads, a convolution, a cumsum, a look-up, norms and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embedding(ids)) + kept.cumsum(-1)[..., None]
        q = x.view(1, 16, 4, 2).transpose(1, 2)
        k = q[:, :2].unsqueeze(2).expand(1, 2, 2, 16, 2).reshape(1, 4, 16, 2)
        y = F.scaled_dot_product_attention(q, k, k, attn_mask=kept[:, None, None, :] > 0, dropout_p=0.1)
        z = F.scaled_dot_product_attention(q * 2, y, y, is_causal=True).transpose(1, 2).flatten(2)
        z = F.layer_norm(self.convolution(z.mT).mT, (8,)) / z.abs().amax(1, keepdim=True)
        return F.cross_entropy(self.linear(z).flatten(0, 1), ids.flatten() % 8)


SINGLE = re.compile(r"\.args\[|(=|,) \w+(\.\w+)*\.args$")


def test_positions_are_not_counted_while_a_program_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nodes of ringopt's operators, whoever reads them."""
    whole: Any = fx.Node.args
    found: set[str] = set()

    def args(node: fx.Node) -> Any:
        frame = sys._getframe(1)
        path, line = frame.f_code.co_filename, ""
        if traits_of(node) is not None and path.startswith(str(ROOT)) and "/tests/" not in path:
            line = linecache.getline(path, frame.f_lineno).strip()
        if SINGLE.search(line):
            found.add(f"{Path(path).relative_to(ROOT)}: {line}")
        return whole.__get__(node)

    gm, inputs = captured(Program(), torch.arange(16)[None] % 20, torch.ones(1, 16))
    monkeypatch.setattr(fx.Node, "args", property(args, whole.__set__))
    assert fx.Graph().call_function(torch.ops.ringopt.gather.default, ("x",)).args[0] == "x"  # of the tests: not found
    for options in (Options(), Options(segment_lengths=(8,), dilation_rates=(2,)), Options(sync_gradients=False)):
        made = transform(gm, inputs, options, Seat(0, 2))
        assert made.graph is not None and any(map(attends, made.graph.graph.nodes))
        order(made.graph.graph, Budget(2))
    assert found == {"ringopt/ir/nodes.py: return node.args[place]"}  # `named`, which goes by the schema
