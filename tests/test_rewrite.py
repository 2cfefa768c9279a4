"""The form of passes that match, check and rewrite: what is done in which order, and that what they make says where it
comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F

from ringopt.distributed.mesh import PretendedMesh
from ringopt.ir.nodes import emit, op_name
from ringopt.ir.refusal import Refusal
from ringopt.options import Options
from ringopt.passes import LINE, UNDERSTAND, with_options
from ringopt.pipeline import Context, Pass, Pipeline
from ringopt.rewrite import Facts, Rewrite
from tests.harness.capturing import after

aten = torch.ops.aten


@dataclass(frozen=True)
class Doubling(Rewrite[fx.Node, fx.Node]):
    """x + x becomes 2 * x, but for what is x + x itself."""

    name = "doubling"
    writes = ("left_alone", "notes")

    def subjects(self, facts: Facts) -> Iterable[fx.Node]:
        return list(facts.graph.nodes)

    def match(self, node: fx.Node, facts: Facts) -> fx.Node | None:
        return node if op_name(node) == "add" and node.args[0] is node.args[1] else None

    def check(self, found: fx.Node, facts: Facts) -> Refusal | None:
        fits = op_name(found.args[0]) != "mul"  # type: ignore[arg-type]
        return None if fits else Refusal("it is doubled already", found)

    def rewrite(self, found: fx.Node, facts: Facts) -> None:
        with facts.graph.inserting_before(found):
            found.replace_all_uses_with(emit(facts.graph, aten.mul.Scalar, (found.args[0], 2), found))

    def refuse(self, found: fx.Node, refusal: Refusal, facts: Facts) -> None:
        facts.context.left_alone.append(refusal)

    def finish(self, facts: Facts) -> None:
        facts.context.notes.append("done")


def test_each_subject_sees_what_was_made_of_those_before_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    once = graph.call_function(aten.add.Tensor, (x, x))
    twice = graph.call_function(aten.add.Tensor, (once, once))
    graph.output(graph.call_function(aten.neg.default, (twice,)))
    context = Context(Options(), PretendedMesh(0, 1))
    gm = fx.GraphModule({}, graph)
    Pipeline([Doubling()]).run(gm, context)
    assert [op_name(node) for node in gm.graph.nodes if node.op == "call_function"] == ["mul", "add", "neg"]
    assert [(one.sentence, one.node) for one in context.left_alone] == [("it is doubled already", twice)]
    assert context.notes == ["done"]


def test_a_fact_is_found_once() -> None:
    facts, asked = Facts(fx.Graph(), Context(Options(), PretendedMesh(0, 1))), []
    for _ in range(2):
        assert facts.once("key", lambda: asked.append(1) or len(asked)) == 1  # type: ignore[func-returns-value]


class Every(nn.Module):
    """Attention in three forms, with masks, dropout and repeated heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).view(1, 12, 4, 2).transpose(1, 2)
        few = q[:, :2].unsqueeze(2).expand(1, 2, 2, 12, 2).reshape(1, 4, 12, 2)
        y = F.scaled_dot_product_attention(q, few, few, attn_mask=kept[:, None, None, :], dropout_p=0.1)
        scores = (y @ few.mT / 2).masked_fill(~kept[:, None, None, :], -torch.inf)
        return F.scaled_dot_product_attention(*3 * (scores.softmax(-1) @ few,), is_causal=True)


@pytest.mark.parametrize("asked", [{}, {"segment_lengths": (4,), "dilation_rates": (2,)}], ids=["plain", "dilated"])
def test_what_is_made_says_where_it_comes_from(asked: dict[str, object]) -> None:
    """The line of the program, and the module: reports and profiles go by them."""
    kept = torch.ones(1, 12, dtype=torch.bool)
    gm, context = after(UNDERSTAND, Every(), torch.randn(1, 12, 8), kept, ranks=2, **asked)
    made = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [op_name(node) for node in made].count("attention") == len(context.sites) == 3
    assert [node.name for node in made if not node.meta.get("stack_trace")] == []
    assert all("test_rewrite.py" in info.source for info in context.sites.values())


@pytest.mark.parametrize("step", LINE, ids=lambda step: step.name)
def test_fields_of_a_pass_are_options(step: Pass) -> None:
    """Of the same name, and by default the same."""
    assert step.with_options(Options()) == step


def test_a_pass_has_what_was_asked_for() -> None:
    steps = {step.name: step for step in with_options(LINE, Options(shard="attention", inner_backend="eager"))}
    assert steps["shard_sequence"].shard == "attention"  # type: ignore[attr-defined]
    assert steps["choose_strategy"].shard == "attention"  # type: ignore[attr-defined]
    assert steps["schedule"].inner_backend == "eager"  # type: ignore[attr-defined]
    assert not any("options" in (*step.reads, *step.writes) for step in LINE)
