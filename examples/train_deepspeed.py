"""DeepSpeed's ZeRO on a byte-level Llama, one sequence spread over the ranks.

    deepspeed --num_accelerators 2 examples/train_deepspeed.py      # or torchrun --nproc-per-node 2

One line differs from training with data parallelism alone, `engine.compile(backend="ring")`, and all ranks pass the
same batch. Beside data parallelism, pass the ranks of a sequence: `compile_kwargs={"options": {"mesh": mesh["cp"]}}`.
Needs `pip install deepspeed transformers`.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ringopt

LENGTH, STEPS = 1024, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: LENGTH * STEPS * 2]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(STEPS, 2, LENGTH)


def main() -> int:
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    engine.compile(backend="ring")
    losses = []
    for tokens in batches().to(engine.device):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    if dist.get_rank() == 0:
        print(f"losses {losses}")
        print(*ringopt.reports(), sep="\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
