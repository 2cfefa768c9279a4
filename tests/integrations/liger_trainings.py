"""Prints losses and norms of gradients of models that Liger patched, on as many ranks as there are, whose kernels
Triton's interpreter runs. Arguments: names of model types."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.triton_interpreter import as_kernels_need_it

OWN = {"gemma2": {"attn_implementation": "eager"}}  # for its softcap
SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, attn_implementation="sdpa", sliding_window=5, pad_token_id=0, use_cache=False,
)  # fmt: skip
LENGTHS = (13, 18, 23)


def tell(*words: Any) -> None:
    """In one write: ranks share the output."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(names: list[str]) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers import AutoConfig, AutoModelForCausalLM

    import ringopt

    ranks, told = int(os.environ.get("WORLD_SIZE", 1)), 0
    if ranks > 1:
        dist.init_process_group("gloo")
    for name in names:
        torch.manual_seed(0)
        torch._dynamo.reset()
        MODEL_TYPE_TO_APPLY_LIGER_FN[name]()
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | OWN.get(name, {}))).train()
        how = {} if name == names[0] else {"options": {"inner_backend": "aot_eager"}}
        run = torch.compile(model, backend="ring", **how) if ranks > 1 else model
        for seed, tokens in enumerate(LENGTHS):
            ids = torch.randint(1, 64, (2, tokens), generator=torch.Generator().manual_seed(seed))
            model.zero_grad()
            loss: Any = run(input_ids=ids, labels=ids.masked_fill(ids % 3 == 0, -100)).loss
            loss.backward()
            norms = torch.stack([weight.grad.norm() for weight in model.parameters()])
            tell("numbers", name, tokens, float(loss), *norms.tolist())
        if ranks > 1:
            for report in ringopt.reports()[told:]:
                gathered = [each.op for each in report.gathers]
                tell("report", name, report.sharded_fraction, len(report.sites), *gathered)
            told = len(ringopt.reports())


if __name__ == "__main__":
    as_kernels_need_it()
    main(sys.argv[1:])
