"""Packed sequences in vision towers of transformers: one attention in one graph, however many images there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.frontend.data_sizes.traced_again import traces_sizes
from ringopt.frontend.libraries.transformers_packed import attends_packed

pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

TOKENS, WIDTH = 24, 16
MASKS: dict[str, Any] = {"attention_mask": None, "is_causal": False}


class Tower(nn.Module):
    """As models of transformers write it. `broken`: Dynamo ends the graph before, or within, the attention; or that
    is given a mask."""

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.qkv, self.config = nn.Linear(WIDTH, 3 * WIDTH), SimpleNamespace(_attn_implementation="sdpa")
        self.broken = broken

    @property
    def num_key_value_groups(self) -> int:
        if self.broken == "within":
            torch._dynamo.graph_break()
        return 1

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        query, key, value = self.qkv(x).reshape(TOKENS, 3, 2, -1).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        if is_flash_attention_requested(self.config):
            found, _ = attention_interface(
                self, query, key, value, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=None,
                attention_mask=x.new_zeros(TOKENS, TOKENS) if self.broken == "masked" else None, is_causal=False,
                dropout=print() or 0.0 if self.broken == "before" else 0.0,
            )  # fmt: skip
        else:
            lengths = cu_seqlens[1:] - cu_seqlens[:-1]
            splits = [torch.split(each, lengths.tolist(), dim=2) for each in (query, key, value)]
            parts = [attention_interface(self, q, k, v, **MASKS)[0] for q, k, v in zip(*splits, strict=True)]
            found = torch.cat(parts, dim=1)
        return x + found.reshape(TOKENS, WIDTH)


class Text(nn.Module):
    """Which hands on what its caller says of packed sequences, and SDPA ignores."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        attention = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return attention(self, x, x, x, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **MASKS)[0]


def compiled(model: nn.Module, taken: bool = True) -> tuple[Any, list[torch.fx.GraphModule]]:
    graphs: list[torch.fx.GraphModule] = []

    @traces_sizes(lambda: taken)
    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm

    teach_dynamo()
    torch._dynamo.reset()
    return torch.compile(model, backend=backend), graphs


def test_images_see_themselves_in_one_graph() -> None:
    torch.manual_seed(0)
    model, x = Tower().double(), torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    run, graphs = compiled(model)
    for ends in ([0, 24], [0, 7, 24], [0, 1, 9, 10, 24]):
        packed = torch.tensor(ends, dtype=torch.int32)
        grads = [torch.autograd.grad(each(x, packed).square().sum(), model.qkv.weight)[0] for each in (model, run)]
        assert torch.allclose(run(x, packed), model(x, packed), atol=1e-12, rtol=0)
        assert torch.allclose(grads[1], grads[0], atol=1e-11, rtol=0)
    assert len(graphs) == 2 and graphs[-1].graph.find_nodes(op="call_function", target=torch.searchsorted)
    with pytest.raises(RuntimeError, match="do not add up"):
        run(x, torch.tensor([0, 23]))


def test_others_are_traced_as_they_are_written() -> None:
    x, packed = torch.randn(TOKENS, WIDTH), torch.tensor([0, 7, 24])
    for model, taken in ((Tower(), False), (Tower("before"), True), (Tower("within"), True), (Tower("masked"), True)):
        run, graphs = compiled(model, taken)
        assert torch.allclose(run(x, packed), model(x, packed), atol=1e-6)
        assert not any(gm.graph.find_nodes(op="call_function", target=torch.searchsorted) for gm in graphs)
    text, heads = Text(), torch.randn(1, 2, TOKENS, 8)
    run, graphs = compiled(text)
    assert torch.equal(run(heads, packed), text(heads, packed)) and len(graphs) == 1
    assert attends_packed(Tower.forward.__code__) and not attends_packed(Text.forward.__code__)
