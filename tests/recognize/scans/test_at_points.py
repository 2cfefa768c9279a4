"""Views of tensors at two of the elements beside their rows."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ringopt.ir.nodes import value_of
from ringopt.ir.symbolic_sizes import into_arguments
from ringopt.recognize.scans.at_points import AtFew, NotAlike, view_of_few

VIEWS = {
    "rows are split": ((5, 8, 7), (2, 8, 2), (5, 4, 2, 7), [2, 4, 2, 2]),
    "rows are joined": ((5, 4, 2, 7), (2, 4, 2, 2), (5, 8, 7), [2, 8, 2]),
    "dims of one index come and go": ((5, 1, 8, 7), (2, 1, 8, 2), (5, 8, 1, 7, 1), [2, 8, 1, 2, 1]),
    "a few that are all": ((2, 8), (2, 8), (16,), [16]),
    "nothing": ((5, 8), (2, 8), (5, 8), [2, 8]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_few(name: str) -> None:
    whole, here, out, wanted = VIEWS[name]
    assert view_of_few(whole, here, out) == wanted


@pytest.mark.parametrize(
    "whole, here, out", [((5, 8), (2, 8), (40,)), ((40, 3), (2, 3), (5, 8, 3)), ((8, 5, 3), (8, 2, 2), (8, 15))]
)
def test_few_are_not_merged_or_split(whole: tuple[int, ...], here: tuple[int, ...], out: tuple[int, ...]) -> None:
    with pytest.raises(NotAlike):
        view_of_few(whole, here, out)


def test_rows_are_all_there() -> None:
    x = fx.Graph().placeholder("x")
    x.meta["val"] = torch.empty(5, 1, 8, 7)
    assert AtFew().few(x, -2) == [2, 1, 8, 2]


def test_sizes_that_data_decide_are_not_at_hand() -> None:
    x, env = fx.Graph().placeholder("x"), ShapeEnv()
    with FakeTensorMode(shape_env=env):
        x.meta["val"] = torch.empty(env.create_unbacked_symint(), 8, 3)
    with pytest.raises(NotAlike):
        AtFew.of(x, -2)


def test_no_fewer_rows_than_are_asked_for() -> None:
    """Of a length that is 5 * c + 1, which 30 is not."""

    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    dim = 5 * torch.export.Dim("c", min=2, max=99) + 1
    graph = torch.export.export(Same(), (torch.randn(2, 11, 3),), dynamic_shapes=({1: dim},)).graph
    (x,) = graph.find_nodes(op="placeholder")
    assert AtFew.of(x, -2, most=30).few(x, -2) == [2, 31, 2]


# ---- whatever comes behind a row -------------------------------------------------------------------------------------
FROM_THE_START = {
    "all but some rows": lambda x: x[:, 3:],
    "the first rows": lambda x: x[:, :3],
    "all but the last": lambda x: x[:, :-3],
    "each second": lambda x: x[:, 1::2],
    "one row": lambda x: x[:, 2],
    "zeros in front": lambda x: F.pad(x, (0, 0, 2, -2)),
    "rows in front": lambda x: torch.cat([x[:, :2], x], 1),
    "written rows": lambda x: x.slice_scatter(x[:, :3] * 2, 1, 2, 5),
    "other dims": lambda x: x[:, :, -1:].flip(2).mT,
    "sums up to each": lambda x: x.cumsum(1),
    "pairs of rows": lambda x: x[:, None].expand(-1, x.shape[1], -1, -1) * x[:, :, None],
    "pairs that are near": lambda x: x[:, :, None, 0].expand(-1, -1, x.shape[1]).tril(2),
    "numbers of rows": lambda x: x + torch.arange(3, x.shape[1] + 3)[:, None],
}
FROM_THE_END = {
    "the last rows": lambda x: x[:, -3:],
    "the last row": lambda x: x[:, -1],
    "turned round": lambda x: x.flip(1),
    "zeros behind": lambda x: F.pad(x, (0, 0, 0, 2)),
    "the last in front": lambda x: F.pad(x, (0, 0, 2, -2), mode="circular"),
    "rows behind": lambda x: torch.cat([x, x[:, :2]], 1),
    "the last are written": lambda x: x.slice_scatter(x[:, :3] * 2, 1, -3, 2**63 - 1),
    "all but the last are written": lambda x: x.slice_scatter(x[:, :-3] * 2, 1, 0, -3),
    "merged with others": lambda x: x.flatten(1, 2),
    "of every row": lambda x: x.sum(1),
    "by the length": lambda x: x * x.shape[1],
    "pairs by the length": lambda x: x[:, :, None, 0].expand(-1, -1, x.shape[1]).tril(x.shape[1] - 20),
    "numbers from the last": lambda x: x + torch.arange(x.shape[1] - 1, -1, -1)[:, None],
}


@pytest.mark.parametrize("name", [*FROM_THE_START, *FROM_THE_END])
def test_rows_are_counted_from_the_start(name: str) -> None:
    class Program(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ({**FROM_THE_START, **FROM_THE_END})[name](x)

    graph = torch.export.export(
        Program(), (torch.randn(2, 12, 5),), dynamic_shapes=({1: torch.export.Dim("n", min=8, max=64)},)
    ).graph
    into_arguments(graph)
    (x,) = graph.find_nodes(op="placeholder")
    at = AtFew.of(x, -2)
    assert at.few(x, -2) == [2, 64, 2]
    calls = [node for node in graph.nodes if node.op == "call_function" and isinstance(value_of(node), torch.Tensor)]
    if name in FROM_THE_START:
        for node in calls:
            at.counts_from_the_start(node)
    else:
        with pytest.raises(NotAlike):
            for node in calls:
                at.counts_from_the_start(node)
