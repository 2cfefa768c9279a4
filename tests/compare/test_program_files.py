"""A .pt2 file read for a diff says of every node what the program that torch loads from it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

import ringopt
from ringopt.compare.graph_diff import NodeView
from ringopt.compare.node_views import views_of
from ringopt.compare.program_files import Unknown, read_program
from ringopt.errors import ProgramError
from ringopt.frontend.pt2.archive import load


class Many(nn.Module):
    """Buffers that are written, constants, several results, a nested graph, numbers of every kind, an open size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rows", torch.arange(64.0), persistent=False)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False))
        self.mix[2].weight = self.mix[0].weight
        self.mean = torch.tensor([1.0, float("nan")])

    def forward(self, x: Tensor, how: dict[str, Tensor], twice: bool, note: str | None = None) -> dict[str, Tensor]:
        self.calls.add_(1)
        with torch.no_grad():
            scale = x.amax(-1, keepdim=True) + self.mean[0]
        q, k, v = self.mix(x / scale)[:, None].repeat(1, 1, 1, 3).chunk(3, -1)
        size = x.shape[1] // 2
        values, places = torch.topk(how["more"].to(torch.bfloat16), 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
        zeros = torch.zeros(x.shape[0], size, dtype=torch.int64, device="cpu")
        picked = zeros.index_put((places[:1, :1],), places[0, 0])
        return {"mixed": mixed * (2 if twice else 1), "values": values, "picked": picked, "same": x}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


def many() -> ExportedProgram:
    inputs = (torch.rand(2, 12, 8), {"more": torch.rand(1, 5)}, True)
    return export(Many(), inputs, dynamic_shapes=({1: Dim("n", min=4, max=64)}, {"more": None}, None))


def attends() -> ExportedProgram:
    return export(Attends(), (torch.rand(1, 16, 8),), dynamic_shapes=({1: Dim("n", min=4, max=64)},))


def converted() -> ExportedProgram:
    return ringopt.convert(attends())


def trained() -> ExportedProgram:
    return attends().run_decompositions()


def nameless(view: NodeView) -> NodeView:
    """torch calls nodes without a result anew."""
    return view if view.shape or view.op == "output" else replace(view, name="", text="")


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", [many, attends, converted, trained])
def test_every_node_and_tensor_is_that_of_the_loaded_program(
    program: Callable[[], ExportedProgram], tmp_path: Path
) -> None:
    torch.export.save(program(), tmp_path / "a.pt2")
    read, loaded = read_program(tmp_path / "a.pt2"), load(tmp_path / "a.pt2")
    for ranks in (None, 3):
        assert list(map(nameless, views_of(read, ranks))) == list(map(nameless, views_of(loaded, ranks)))
    known = {**loaded.constants, **loaded.state_dict}
    assert set(read.stored) == set(known)
    assert all(torch.equal(read.stored[name].nan_to_num(), value.nan_to_num()) for name, value in known.items())
    assert ringopt.diff(tmp_path / "a.pt2", loaded).same


def test_an_operator_that_is_not_there_is_left_to_torch(tmp_path: Path) -> None:
    """Which says what to do."""
    with torch.library._scoped_library("gone", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        class Twice(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.gone.twice(x)  # type: ignore[no-any-return]

        torch.export.save(export(Twice(), (torch.ones(2),)), tmp_path / "a.pt2")
    with pytest.raises(Unknown, match=r"the operator torch\.ops.gone\.twice\.default"):
        read_program(tmp_path / "a.pt2")
    with pytest.raises(ProgramError, match="import what defines its outputs and operators"):
        ringopt.diff(tmp_path / "a.pt2", tmp_path / "a.pt2")
