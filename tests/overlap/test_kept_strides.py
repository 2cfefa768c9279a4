"""What the forward keeps for the backward has the strides that the backward was compiled for, also where the number of
a rank's tokens is open."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.harness.errors import worst_of

pytest.importorskip("transformers")


def trained_at_two_lengths() -> list[float]:
    """Grouped queries, rotary embeddings, Inductor: the largest errors of gradients, relative."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    model = LlamaForCausalLM(config)
    right, compiled, errors = copy.deepcopy(model), torch.compile(model, backend="ring"), []
    for n in (13, 18):
        ids = torch.randint(32, (2, n), generator=torch.Generator().manual_seed(n))
        for one in (compiled, right):
            one.zero_grad()
            one(input_ids=ids, labels=ids).loss.backward()
        pairs = zip(model.parameters(), right.parameters(), strict=True)
        errors.append(max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs))
    return errors


@pytest.mark.zoo
def test_keys_that_the_backward_sends_again_lie_as_it_expects(ranks):
    assert all(worst_of(*errors) < 1e-5 for errors in ranks(2, trained_at_two_lengths))
