"""What torch.export and ringopt write is read, whatever is in it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._export.serde.serialize import SerializeError
from torch.export import Dim, ExportedProgram, export

import ringopt
from tests.programs.test_zoo import EXPORTED, SAMPLE
from tests.zoo import build, family, missing

Pair = namedtuple("Pair", ["one", "other"])


class Sizes(nn.Module):
    """Powers, quotients, a number that is known when it runs, and assertions about it."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[1]
        count = x.sum().to(torch.int64).item()
        torch._check(count >= 0)
        torch._check(count < n)
        halves = x.reshape(2, n // 2, 2, 8).sum(2)
        return x[:, : n // 2] + halves, torch.zeros(n * n - 1), x[:, :count], max(n, 7) * x, (n / 3) * x, x[:, ::3]


class Higher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strange = nn.ModuleDict({"a-b": nn.Linear(8, 8), "<c>": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.strange["a-b"](x)
        with torch.no_grad():
            scale = x.amax()
        z = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        mapped = torch.func.vmap(lambda row: row * 2)(z)
        return self.strange["<c>"](mapped) * scale + y + torch.einsum("abc,abc->ab", x, x)[..., None]


class Trees(nn.Module):
    def forward(self, given: dict[str, Any], *, pairs: Any, mode: str, times: float) -> Any:
        x = given["an input"] + pairs[0][0] + pairs[1]["z"]
        return {"of sums": [x * times, Pair(x, x)], "none": None, "more": defaultdict(list, z=x)}


def sizes() -> ExportedProgram:
    return export(Sizes(), (torch.rand(2, 12, 8),), dynamic_shapes=({1: 2 * Dim("n", min=2, max=64)},))


def higher() -> ExportedProgram:
    return export(Higher(), (torch.rand(2, 4, 8),), dynamic_shapes=({1: Dim("n", max=64)},))


def trees() -> ExportedProgram:
    """Of classes that torch does not unpickle with weights_only, which a file of theirs needs, only outputs."""
    x = torch.ones(2)
    pairs = ([x], OrderedDict(z=x))
    return export(Trees(), ({"an input": x},), {"pairs": pairs, "mode": "bilinear", "times": float("inf")})


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [sizes, higher, trees])
@pytest.mark.parametrize("decomposed", [False, True])
def test_programs_are_read_and_run(make: Callable[[], ExportedProgram], decomposed: bool, tmp_path: Path) -> None:
    torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")
    program = make().run_decompositions() if decomposed else make()
    try:
        torch.export.save(program, tmp_path / "a.pt2")
    except SerializeError as error:
        assert torch.__version__.startswith("2.11") and make is higher and not decomposed
        pytest.skip(f"this torch cannot save it: {str(error)[:100]}")
    ringopt.load(tmp_path / "a.pt2").module()
    assert ringopt.diff(tmp_path / "a.pt2", tmp_path / "a.pt2").same


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EXPORTED[:1] else [pytest.mark.zoo]) for name in SAMPLE]
)
def test_models_of_the_zoo_are_read(name: str, tmp_path: Path) -> None:
    if missing(family(name)):
        pytest.skip(missing(family(name)))
    module, inputs = build(name, SAMPLE[name][0])
    program = export(module, (), inputs)
    for number, each in enumerate((program, ringopt.convert(program, allow_empty=True))):
        path = tmp_path / f"{number}.pt2"
        torch.export.save(each, path)
        ringopt.load(path)
        assert ringopt.diff(path, path).same
