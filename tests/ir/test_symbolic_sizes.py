"""Sizes as nodes: each is computed from inputs, which come before all else."""

import itertools
import sys

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ringopt.ir.symbolic_sizes import Linear, divides, elements, formula, into_arguments, into_nodes, slice_of


def test_an_input_that_is_read_before_the_next_one():
    gm = make_fx(lambda x, y: x.new_zeros(y.shape[0]) + y, tracing_mode="symbolic")(torch.ones(3), torch.ones(5))
    into_arguments(gm.graph)
    x, y = gm.graph.find_nodes(op="placeholder")
    zeros: fx.Node = next(iter(x.users))
    y.prepend(zeros)  # as an input is cut into rows as soon as it is there
    into_nodes(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(torch.ones(2), torch.ones(4)), torch.ones(4))


def test_sizes_in_arguments_leave_no_node_that_computes_them():
    gm = make_fx(lambda x: x.new_zeros(2 * x.shape[0] + 1).view(1, -1), tracing_mode="symbolic")(torch.ones(3))
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in gm.graph.nodes)
    into_arguments(gm.graph)
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in gm.graph.nodes if node.op == "call_function")


def test_the_larger_of_the_sizes_of_two_inputs():
    gm = make_fx(lambda x, y: x.new_zeros(torch.sym_max(x.shape[0], y.shape[0])), tracing_mode="symbolic")(
        torch.ones(3), torch.ones(5)
    )
    into_arguments(gm.graph)
    into_nodes(gm.graph)
    gm.recompile()
    assert [len(gm(torch.ones(n), torch.ones(m))) for n, m in ((2, 4), (7, 4))] == [4, 7]


def test_a_size_that_tells_its_symbol():
    """As `4 * Dim("quarter")` and `Dim("n") + 1` do."""
    env = ShapeEnv()
    n, m = (env.create_unbacked_symint() for _ in range(2))
    told = {name: Linear.of(formula(size)) for name, size in {
        "n": n, "4 n": 4 * n, "3 n + 2": 3 * n + 2, "7 (n // 5)": 7 * (n // 5),
        "n m": n * m, "n + m": n + m, "2 - n": 2 - n, "n n": n * n, "9": 9,
    }.items()}  # fmt: skip
    assert {name: (each.step, each.offset, each.solved(23)) for name, each in told.items() if each is not None} == {
        "n": (1, 0, 23), "4 n": (4, 0, 5), "3 n + 2": (3, 2, 7), "7 (n // 5)": (7, 0, 3)
    }  # fmt: skip


def test_what_divides_for_every_length():
    """Columns of a picture with half as many rows as another: 4 of each row, of whole rows."""
    found = {}

    def traced(x):
        rows = (x.shape[0] - 1) // 2 + 1
        pairs = {
            "rows, 4 rows": (rows, 4 * rows), "2 rows, 4 rows": (2 * rows, 4 * rows), "rows, 0": (rows, 0),
            "rows, rows + 2": (rows, rows + 2), "4 rows, 2 rows": (4 * rows, 2 * rows), "rows, 12": (rows, 12),
            "3 rows, 4 rows": (3 * rows, 4 * rows), "n, n rows": (x.shape[0], x.shape[0] * rows),
            "rows, n": (rows, x.shape[0]), "2, 2 n": (2, 2 * x.shape[0]), "2, n": (2, x.shape[0]),
        }  # fmt: skip
        found.update({name: divides(size, whole) for name, (size, whole) in pairs.items()})
        return x + 1

    make_fx(traced, tracing_mode="symbolic")(torch.ones(16))
    assert [name for name, answer in found.items() if answer] == [
        "rows, 4 rows", "2 rows, 4 rows", "rows, 0", "n, n rows", "2, 2 n"
    ]  # fmt: skip


def test_slices_are_those_of_python():
    ends = [None, 0, 1, 3, 4, 5, 9, -1, -4, -5, sys.maxsize]
    for size, start, end, step in itertools.product((0, 1, 4), ends, ends, (1, 2, 3)):
        first, by, count = slice_of(size, start, end, step)
        rows = range(size)[start:end:step]
        assert (by, count) == (step, len(rows)) and (not rows or first == rows[0]), (size, start, end, step)


def test_elements_of_sizes_that_data_decide_are_none():
    """Such a size has no value at hand."""
    assert elements([2, 3, 4]) == 24 and elements([]) == 1
    assert elements([2, 3 * ShapeEnv().create_unbacked_symint()]) == 0
