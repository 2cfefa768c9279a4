"""The softmax of Transformer Engine: stand-ins of its operators, in an attention that is written out around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.harness.translation import validate

if hasattr(torch.ops.te_softmax, "scaled_softmax_fwd"):
    pytest.skip("Transformer Engine itself is here", allow_module_level=True)


def softmax(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Where all is masked, zeros."""
    if mask is None:
        return (x * scale).softmax(-1)
    return (x * scale).masked_fill(mask, -10000.0).softmax(-1) * ~mask.all(-1, keepdim=True)


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool).triu(x.shape[-1] - x.shape[-2] + 1)


MASKED = "(Tensor inputs, Tensor mask, float scale) -> Tensor"
PLAIN = "(Tensor inputs, float scale) -> Tensor"
KERNELS = {
    "scaled_softmax_fwd": (PLAIN, lambda x, scale: softmax(x, None, scale)),
    "scaled_masked_softmax_fwd": (MASKED, softmax),
    "scaled_aligned_causal_masked_softmax_fwd": (PLAIN, lambda x, scale: softmax(x, causal(x), scale)),
}
LIBRARY = torch.library.Library("te_softmax", "DEF")
for _name, (_schema, _kernel) in KERNELS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"te_softmax::{_name}", lambda x, *_: torch.empty_like(x), lib=LIBRARY)


class Unfused(nn.Module):
    """Without gradients: the stand-ins have none."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.qkv = name, nn.Linear(8, 24).requires_grad_(False)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        given = (hidden,) if self.name == "scaled_masked_softmax_fwd" else ()
        weights = getattr(torch.ops.te_softmax, self.name)(y @ k.mT, *given, 0.5)
        return (weights @ v).transpose(1, 2).flatten(2).sin()


@pytest.mark.parametrize(("name", "p"), [*zip(KERNELS, (2, 3, 2), strict=True)])
def test_rows_of_scores_stay_on_shards(name: str, p: int) -> None:
    torch.manual_seed(0)
    x, hidden = torch.randn(2, 13, 8, dtype=torch.float64), torch.rand(2, 1, 13, 13) < 0.3
    found = validate(p, Unfused(name).double(), {"x": x, "hidden": hidden})
    assert found.wrong == ""
    whys = [gather.why for gather in found.report.gathers if "te_softmax" in gather.op]
    assert not whys or ("it counts the rows" in whys[0] and "causal" in name)
    assert bool(whys) == ("causal" in name)
