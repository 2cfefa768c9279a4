"""What a pass declares, and the pipeline holds it to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

import ringopt
from ringopt.distributed.mesh import PretendedMesh
from ringopt.errors import OptionError
from ringopt.options import Options
from ringopt.passes import LINE
from ringopt.pipeline import FIELDS, Context, ContractError, Pass, Pipeline
from tests.harness.translation import validate
from tests.passes.test_find_unfused import Model, given

OPTIONAL = [step.name for step in LINE if step.optional]


@dataclass(frozen=True)
class Touching(Pass):
    """Reads what it declares to read, and whatever `touch` does."""

    touch: Callable[[Context], Any]
    name = "touching"
    reads = ("values", "sites", "scans", "given", "cuts", "pairs", "mixed")
    writes = ("notes",)

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        self.touch(context)


def run(touch: Callable[[Context], Any]) -> Context:
    context = Context(Options(), PretendedMesh(0, 2))
    Pipeline([Touching(touch)]).run(fx.GraphModule({}, fx.Graph()), context)
    return context


def test_what_is_declared_is_at_hand() -> None:
    seen = []
    context = run(lambda context: seen.append((dict(context.values), len(context.sites), context.shards)))
    assert seen == [({}, 0, False)]
    context = run(lambda context: context.notes.append("said"))
    assert context.notes == ["said"]
    assert run(lambda context: setattr(context, "notes", ["set"])).notes == ["set"]


@pytest.mark.parametrize(
    ("touch", "sentence"),
    [
        (lambda context: context.carries, "pass touching looks at context.carries"),
        (lambda context: setattr(context, "values", {}), "pass touching sets context.values"),
        (lambda context: context.values.update({}), "pass touching changes context.values"),
        (lambda context: context.values.__setitem__(1, 2), "pass touching changes context.values"),
        (lambda context: context.sites.clear(), "pass touching changes context.sites"),
        (lambda context: setattr(context, "unheard", 1), "pass touching sets context.unheard"),
    ],
)
def test_what_is_not_declared_is_an_error_that_names_pass_and_field(touch: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        run(touch)


@pytest.mark.parametrize("step", LINE, ids=lambda step: step.name)
def test_a_pass_declares_fields_that_there_are(step: Pass) -> None:
    assert set(step.reads) | set(step.writes) <= FIELDS
    assert not set(step.reads) & set(step.writes)
    assert step.optional == bool(step.lost)


def test_a_pass_is_read_in_one_go() -> None:
    files = (Path(__file__).parent.parent / "passes").glob("*.py")
    assert [path.name for path in files if len(path.read_text().splitlines()) > 150] == []


def differential(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT / 4
    exponentials = (scores - scores.amax(-1, True)).exp()
    spelled = exponentials / exponentials.sum(-1, True) @ v
    return spelled + (scores.softmax(-1) - 0.3 * (scores * 2).softmax(-1)) @ v


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIONAL)
def test_what_is_switched_off_costs_no_digit(name: str) -> None:
    model = Model(lambda _scale, q, k, v, _mask: differential(q, k, v) + repeated(q, k, v))
    verdict = validate(2, model, *given(), disable_passes=[name])
    assert verdict.wrong == ""
    assert any(note.startswith(f"pass {name} is switched off: ") for note in verdict.report.notes)


@pytest.mark.parametrize("name", ["lower", "nothing"])
def test_what_cannot_be_switched_off_is_an_error(name: str) -> None:
    x = torch.ones(1, 2, 8, 4)
    with pytest.raises(OptionError, match=f"'{name}' is n.* may be left out: {', '.join(OPTIONAL)}"):
        ringopt.explain(F.scaled_dot_product_attention, x, x, x, options={"disable_passes": [name]})


def test_names_are_names() -> None:
    with pytest.raises(OptionError, match="disable_passes='lower': expected a tuple of names of passes"):
        Options(disable_passes="lower")
