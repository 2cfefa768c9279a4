"""What a mask reads comes to the host once for all layers and their backwards; a mask that is written comes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.executor.operands import Operands
from ringopt.ops import mask_facts, operators
from tests.harness.models import difference

B, N, D, H = 2, 24, 16, 2
Kept = Callable[[Tensor, int], Tensor]  # the keys that the layer of a number sees


def one(kept: Tensor, layer: int) -> Tensor:
    return kept


def written(kept: Tensor, layer: int) -> Tensor:
    """In place, between the second layer and the third."""
    if layer == 2:
        kept.copy_(kept.cumsum(1) % 3 > 0)  # sums over tokens are no expression of one
    return kept


def another(kept: Tensor, layer: int) -> Tensor:
    """Of which a compiler may write each where the last one was."""
    return (kept * (layer + 1)).cumsum(1) % 4 > 0


class Layers(nn.Module):
    def __init__(self, kept: Kept, checkpoints: bool = False):
        super().__init__()
        self.kept, self.checkpoints = kept, checkpoints
        self.layers = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(3))

    def attend(self, layer: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (part.view(B, N, H, D // H).transpose(1, 2) for part in layer(x).chunk(3, -1))
        mask = torch.zeros(B, 1, N, N, dtype=torch.float64).masked_fill(~seen[:, None, None], -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + y.transpose(1, 2).reshape(B, N, D)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        kept = kept.clone()
        for number, layer in enumerate(self.layers):
            seen = self.kept(kept, number)
            again = partial(checkpoint, self.attend, use_reentrant=False) if self.checkpoints else self.attend
            x = again(layer, x, seen)
        return x


def step(run: Any, module: nn.Module) -> list[Tensor]:
    torch.manual_seed(2)
    x, kept = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True), torch.ones(B, N, dtype=torch.bool)
    kept[0, 17:] = False
    out = run(x, kept)
    (out * torch.randn(B, N, D, dtype=torch.float64)).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def on_rank(kept: Kept, checkpoints: bool, inner: str) -> tuple[float, int]:
    """The error, and how many copies a step begins."""
    torch._dynamo.reset()
    begun, begin = [], MaskFacts.__init__

    def noted(self: MaskFacts, sources: Any) -> None:
        begun.append(len(sources))
        begin(self, sources)

    made = []
    for compiled in (False, True):
        torch.manual_seed(1)
        module = Layers(kept, checkpoints).double()
        run = torch.compile(module, backend="ring", options={"inner_backend": inner, "timeout": 60})
        MaskFacts.__init__ = noted
        try:
            made.append(step(run if compiled else module, module))
        finally:
            MaskFacts.__init__ = begin
    return difference(made[1], made[0]), len(begun)


@pytest.mark.parametrize(
    ("kept", "checkpoints", "inner", "copies"),
    [
        (one, False, "aot_eager", 1),
        (written, False, "aot_eager", 2),
        (another, False, "aot_eager", 3),
        pytest.param(another, False, "inductor", 3, marks=pytest.mark.zoo),
        pytest.param(one, False, "inductor", 1, marks=pytest.mark.zoo),
        pytest.param(one, True, "inductor", 1, marks=pytest.mark.zoo),
        pytest.param(written, False, "inductor", 2, marks=pytest.mark.zoo),
        pytest.param(one, False, "eager", 1, marks=pytest.mark.zoo),
    ],
)
def test_a_mask_comes_once(ranks: Any, kept: Kept, checkpoints: bool, inner: str, copies: int) -> None:
    for error, found in ranks(2, on_rank, kept, checkpoints, inner, timeout=240):
        assert error < 1e-10
        assert found == copies


def test_what_is_known_lives_as_long_as_its_ticket() -> None:
    kept = torch.ones(1, 8, dtype=torch.bool)
    given = Operands(kept, kept, kept, [kept])
    ticket = operators.mask_facts([kept])
    facts = mask_facts.with_facts(given, ticket).facts
    assert facts is mask_facts.with_facts(given, ticket).facts
    number = int(ticket)
    copied = ticket.clone()
    del ticket
    operators.mask_facts([kept])  # forgets those whose ticket is gone
    assert number not in mask_facts._known
    assert mask_facts.with_facts(given, copied).facts is not facts
