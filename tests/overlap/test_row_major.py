"""Where Inductor is told that a value is row-major, because it would compare strides that are not known."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ringopt.overlap.row_major import say_row_major
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.inductor_passes import FORCE_STRIDE_ORDER

aten = torch.ops.aten


@pytest.mark.parametrize(("channels", "open_rows", "forced"), [(1, True, True), (2, True, False), (1, False, False)])
def test_a_value_of_one_channel_whose_view_a_product_reads(channels: int, open_rows: bool, forced: bool) -> None:
    """And whose rows are unbacked: it is row-major and channels last at once."""
    shapes = ShapeEnv()
    graph = fx.Graph()
    x, w = (graph.placeholder(name) for name in ("x", "w"))
    total = graph.call_function(aten.add.Tensor, (x, x))
    view = graph.call_function(aten.view.default, (total, [-1, 4]))
    product = graph.call_function(aten.mm.default, (view, w))
    graph.output((product,))
    with FakeTensorMode(shape_env=shapes):
        rows = shapes.create_unbacked_symint() if open_rows else 5
        x.meta["val"] = total.meta["val"] = torch.empty(1, channels, rows, 4)
        view.meta["val"] = product.meta["val"] = torch.empty(channels * rows, 4)
        w.meta["val"] = torch.empty(4, 4)
    say_row_major(graph)
    (read,) = view.all_input_nodes
    assert (read.target is FORCE_STRIDE_ORDER and read.args[0] is total) if forced else read is total


@pytest.mark.parametrize("open_rows", [True, False])
def test_a_kept_value_is_row_major_where_a_size_of_it_is_open(open_rows: bool) -> None:
    """The strides of others are told to the backward, and vectors have one order."""
    shapes = ShapeEnv()
    graph = fx.Graph()
    x, y = (graph.placeholder(name) for name in ("x", "y"))
    matrix, vector = (graph.call_function(aten.add.Tensor, (a, a)) for a in (x, y))
    graph.output((matrix, vector))
    with FakeTensorMode(shape_env=shapes):
        rows = shapes.create_unbacked_symint() if open_rows else 5
        x.meta["val"] = matrix.meta["val"] = torch.empty(rows, 4)
        y.meta["val"] = vector.meta["val"] = torch.empty(rows)
    say_row_major(graph)
    (kept, same) = graph.output_node().all_input_nodes
    assert same is vector
    assert (kept.target is FORCE_STRIDE_ORDER and kept.args[0] is matrix) if open_rows else kept is matrix
