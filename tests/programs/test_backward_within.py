"""A training step that is compiled whole: `loss.backward()` is called within what is compiled.

Dynamo ends its graph at the backward (unless it is told to trace it), and watches all Python that the backward calls.
It leaves the backward of ringopt's operators alone.
"""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt

SHARDED = "1 of 1 attention, 100% of matrix work on shards"
AS_IT_IS = "a backward of compiled autograd runs as it is"


class Tokens(nn.Module):
    """An attention, a causal convolution and a running mean: operators of ringopt that send in their backward. Wide
    enough that the attention's exchange starts early there."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(10, 32), nn.Linear(32, 96), nn.Linear(32, 10)
        self.mix, self.out = nn.Conv1d(32, 32, 3, groups=32), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.mix(F.pad(x.mT, (2, 0))).mT
        return self.head(x + x.cumsum(1) / (1 + torch.arange(x.size(1))[:, None]))


def step(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def stepped(inner: str, setting: str) -> tuple[float, str]:
    """How far the gradients of two steps are from those of one process, and what the reports of all graphs say."""
    torch.manual_seed(0)
    alone = Tokens().double()
    model, tokens = copy.deepcopy(alone), torch.randint(10, (2, 24))
    torch._dynamo.reset()
    before = len(ringopt.reports())
    with torch._dynamo.config.patch({setting: True} if setting else {}):
        compiled = torch.compile(step, backend="ring", options={"inner_backend": inner, "on_refusal": "ignore"})
        for _ in range(2):
            compiled(model, tokens), step(alone, tokens)
    apart = [(a.grad - b.grad).abs().max() for a, b in zip(model.parameters(), alone.parameters(), strict=True)]
    return float(max(apart)), " ".join(" ".join(map(str, ringopt.reports()[before:])).split())


@pytest.mark.parametrize(
    "inner, setting, said",
    [
        pytest.param("eager", "", [SHARDED], marks=pytest.mark.zoo),
        ("aot_eager", "", [SHARDED]),
        # The backward is in the graph of the forward, which is left whole.
        ("aot_eager", "trace_autograd_ops", ["a gradient that is taken within a graph is not sharded"]),
        # The backward is compiled by itself, with the operators of ringopt that it holds: it runs as it is.
        ("aot_eager", "compiled_autograd", [SHARDED, AS_IT_IS]),
        pytest.param("eager", "compiled_autograd", [SHARDED, AS_IT_IS], marks=pytest.mark.zoo),
    ],
)
def test_the_backward_of_a_step_that_is_compiled_whole(ranks, inner, setting, said):
    for apart, reports in ranks(2, stepped, inner, setting):
        assert apart < 1e-12 and all(sentence in reports for sentence in said)


def test_dynamo_leaves_every_backward_alone():
    """Where it did not, it compiled the backward of an attention, and failed."""
    for file in Path(ringopt.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register_autograd"):
                assert ast.unparse(node.args[0]).startswith("never_compiled("), file
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                backward = next(x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "backward")
                assert "never_compiled" in map(ast.unparse, backward.decorator_list), f"{file}: {node.name}"
