"""`ringopt.convert` of programs without attention: one file, any length, any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim, export

import ringopt
from ringopt.drivers.convert import convert_program
from ringopt.tools.benchmarks.models.recurrent_layers import CHUNK, DIM, GatedDeltaNet, Mamba2
from tests.harness.models import difference, run
from tests.harness.pool import RankError

WIDTH = 8


class Decaying(nn.Module):
    """S = a S + b for each token, by torch's scan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layer(x).movedim(1, 0).chunk(2, -1)

        def step(state: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            state = state * row[0] + row[1]
            return state, state.clone()

        rows: Tensor = scan(step, torch.zeros_like(x[:, 0]), (a.sigmoid(), b))[1]
        out: Tensor = self.out(rows.movedim(0, 1))
        return out


class Summed(nn.Module):
    """Linear attention as prefix sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).chunk(3, -1)
        out: Tensor = self.out(q * (k.tanh() * v).cumsum(1))
        return out


class Convolved(nn.Module):
    """The rows of a picture, with statistics over all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.last = nn.Conv2d(4, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x[:, None])).relu())[:, 0]
        return out


def rows(length: int, width: int = WIDTH) -> dict[str, Tensor]:
    return {"x": torch.randn(2, length, width, generator=torch.Generator().manual_seed(length)).double()}


def distances(file: Path, wanted: dict[int, list[Tensor]], width: int = WIDTH) -> list[float]:
    """Of outputs and gradients, by length."""
    module = ringopt.load(file).module()
    return [difference(run(lambda x: module(x), module, rows(length, width)), wanted[length]) for length in wanted]


# By module: the strategy of its one site, where it has one.
MODULES = {Decaying: ["states"], Summed: [], Convolved: []}
OLD = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own scan has other gradients")


@pytest.mark.parametrize(
    "made, p",
    [
        *(pytest.param(Decaying, p, marks=[OLD] if p == 2 else [OLD, pytest.mark.zoo]) for p in (1, 2, 3)),
        *((Summed, p) for p in (1, 3)),
        (Convolved, 2),
        *(pytest.param(made, p, marks=pytest.mark.zoo) for made, p in ((Summed, 2), (Convolved, 1), (Convolved, 3))),
    ],
)
def test_one_file_serves_any_length(made: type[nn.Module], p: int, ranks: Callable[..., Any], tmp_path: Path) -> None:
    program = export(made().double(), (rows(24)["x"],), dynamic_shapes=({1: Dim("n", min=8, max=99)},))
    converted, report = convert_program(program)
    assert [site.strategy for site in report.sites] == MODULES[made] and report.sharded_fraction == 1.0
    assert [gather.op for gather in report.gathers] == ["output"]
    torch.export.save(converted, tmp_path / "any.pt2")
    whole = program.module()
    wanted = {length: run(lambda x: whole(x), whole, rows(length)) for length in (24, 17, 50)}
    assert max(map(max, ranks(p, distances, tmp_path / "any.pt2", wanted))) < 1e-12


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_ranks_hold_whole_chunks_however_many_they_are(p: int, ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing is gathered between the ends: the convolution takes rows of the neighbour, and the last chunk is padded
    where it is."""
    program = export(GatedDeltaNet(1).double(), (rows(250, DIM)["x"],))
    converted, report = convert_program(program)
    assert [site.strategy for site in report.sites] == ["states"] and report.sharded_fraction == 1.0
    assert [gather.op for gather in report.gathers] == ["output"]
    torch.export.save(converted, tmp_path / "chunks.pt2")
    whole = program.module()
    wanted = {250: run(lambda x: whole(x), whole, rows(250, DIM))}
    assert max(map(max, ranks(p, distances, tmp_path / "chunks.pt2", wanted, DIM))) < 1e-12


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_whole_chunks_by_a_dim_derived_from_another(p: int, ranks: Callable[..., Any], tmp_path: Path) -> None:
    """The input has 64 * c tokens, and the file reads c from them."""
    dim = CHUNK * Dim("c", min=6, max=99)
    program = export(Mamba2(1).double(), (rows(8 * CHUNK, DIM)["x"],), dynamic_shapes=({1: dim},))
    converted, report = convert_program(program)
    assert [site.strategy for site in report.sites] == ["states"] and report.sharded_fraction == 1.0
    assert [gather.op for gather in report.gathers] == ["output"]
    torch.export.save(converted, tmp_path / "chunks.pt2")
    whole = program.module()
    wanted = {length: run(lambda x: whole(x), whole, rows(length, DIM)) for length in (8 * CHUNK, 13 * CHUNK)}
    assert max(map(max, ranks(p, distances, tmp_path / "chunks.pt2", wanted, DIM))) < 1e-12


def test_few_rows_on_the_way_are_whole_on_any_number_of_ranks() -> None:
    """Two windows are enough for two ranks, and not for three: one file serves both."""

    class Reduced(Summed):
        def __init__(self) -> None:
            super().__init__()
            self.windows = nn.Conv1d(WIDTH, WIDTH, 8, stride=8)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + self.windows(y.mT).tanh().mean(-1)[:, None]  # type: ignore[no-any-return]

    _, report = convert_program(export(Reduced().double(), (rows(16)["x"],)))
    assert [gather.op for gather in report.gathers] == ["conv1d", "output"]


def test_a_file_of_few_rows_asks_for_fewer_ranks(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """When it runs: it is the same file for 2 ranks, of which each has a row."""
    program = export(Summed().double(), (rows(2)["x"],))
    torch.export.save(ringopt.convert(program), tmp_path / "few.pt2")
    whole = program.module()
    wanted = {2: run(lambda x: whole(x), whole, rows(2))}
    assert max(map(max, ranks(2, distances, tmp_path / "few.pt2", wanted))) < 1e-12
    with pytest.raises(RankError, match="a contiguous sequence of 2 rows, and 3 ranks need 3; use fewer"):
        ranks(3, distances, tmp_path / "few.pt2", wanted)
