"""NeMo Automodel's hook for compilers, which its recipes call with what `compile:` says: losses of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringopt
from tests.integrations.trainings import LONG

pytest.importorskip("nemo_automodel.components.utils.compile_utils", reason="pip install --no-deps nemo-automodel")
pytestmark = pytest.mark.zoo

CASES = {
    "mode": ({}, (25,)),  # of Inductor, which NeMo passes where there are no options
    "options": ({"outputs": "lazy", "inner_backend": "aot_eager"}, (25, 34, 41)),
}


def trained(options: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, Any]:
    from nemo_automodel.components.utils.compile_utils import build_compile_config, compile_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before, ranks = len(ringopt.reports()), dist.get_world_size()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, **sizes))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    run = compile_model(model, build_compile_config({"enabled": ranks > 1, "backend": "ring", "options": options}))
    for step, length in enumerate(lengths):
        ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(step))
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"loss": losses, "shares": [report.sharded_fraction for report in ringopt.reports()[before:]]}


@pytest.mark.parametrize("name", CASES)
def test_losses(ranks: Callable[..., list[Any]], name: str) -> None:
    [expected] = ranks(1, trained, *CASES[name], timeout=LONG)
    for found in ranks(2, trained, *CASES[name], timeout=LONG):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert set(found["shares"]) == {1.0}
