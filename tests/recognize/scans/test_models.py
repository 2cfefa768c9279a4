"""Recurrences of transformers' models: found, one scan each, the numbers and gradients of the captured graph."""

from __future__ import annotations

import copy

import pytest
import torch

from ringopt.distributed.mesh import PretendedMesh
from ringopt.frontend.capture import capture
from ringopt.options import Options
from ringopt.passes.find_scan import FindScan
from ringopt.passes.normalize import Normalize
from ringopt.pipeline import Context, Pipeline
from ringopt.scans.call import is_scan
from tests.harness.translation import captured, difference, values_and_gradients
from tests.zoo.outcomes import in_float64

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, use_cache=False, pad_token_id=0)
DENSE = dict(SIZES, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
STATES = dict(SIZES, chunk_size=32, n_groups=1)
MODELS = {
    "qwen3_next": (320, dict(DENSE, **EXPERTS, **DELTA, layer_types=["linear_attention"], mlp_only_layers=[0])),
    "mamba2": (160, dict(STATES, num_heads=8, head_dim=8, state_size=8, expand=2)),
    "nemotron_h": (
        160,
        dict(STATES, layers_block_type=["mamba"], mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8),
    ),
    "recurrent_gemma": (
        24,
        dict(DENSE, num_key_value_heads=1, lru_width=32, block_types=["recurrent"], attention_window_size=64),
    ),
    "rwkv": (
        16,
        dict(SIZES | {"num_hidden_layers": 2}, attention_hidden_size=32, intermediate_size=64, context_length=4096),
    ),
}
# As they are drawn, decays forget a chunk within itself.
MILD = {"a_log": -5.0, "recurrent_param": -6.0}


def model(name):
    length, settings = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **settings)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            for part, value in MILD.items():
                if part in key.lower():
                    parameter.fill_(value)
    return made, torch.randint(3, 64, (1, length))


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_found_and_keeps_its_numbers(name):
    made, ids = model(name)
    keywords = {} if name in ("mamba2", "rwkv") else {"use_cache": False}
    gm, inputs = in_float64(*captured(made, input_ids=ids, **keywords))
    context = Context(Options(), PretendedMesh(0, 1))
    flat = capture(gm, inputs).begin(context)
    Pipeline([Normalize()]).run(flat, context)
    plain = copy.deepcopy(flat)
    Pipeline([FindScan()]).run(flat, context)
    assert any(map(is_scan, flat.graph.nodes)) and not any("is no scan" in note for note in context.notes)
    assert len(flat.graph.nodes) < len(plain.graph.nodes)
    found, expected = (values_and_gradients(each, inputs) for each in (flat, plain))
    assert difference(expected, found, 1e-10) == ""
