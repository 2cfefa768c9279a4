"""Tokens that a mask picks, followed through a graph: which dim of each input has the tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.dims.picks import TokensPicked, tokens_picked


def test_what_meets_tokens_one_by_one_has_them_too() -> None:
    """The picked rows of x are added to x + y, so each row of y is of a token."""

    def program(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.where(mask)[0]
        return (x + y).index_add(0, rows, x[rows])

    given = torch.ones(7) > 0, torch.ones(7, 4), torch.ones(7, 4)
    graph = make_fx(program, tracing_mode="symbolic")(*given).graph
    assert tokens_picked(graph) == [TokensPicked(along=(0, 0, 0), out=0)]


def test_tokens_may_be_the_second_dim() -> None:
    """Of [B, S], S is picked from, for the whole batch alike: the index has None in front."""

    def program(mask: Tensor, x: Tensor) -> Tensor:
        columns = torch.where(mask)[0]
        return torch.zeros_like(x).index_add(1, columns, x[:, columns])

    given = torch.ones(7) > 0, torch.ones(3, 7, 4)
    graph = make_fx(program, tracing_mode="symbolic")(*given).graph
    assert tokens_picked(graph) == [TokensPicked(along=(0, 1), out=1)]
