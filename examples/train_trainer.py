"""The Trainer of transformers on a byte-level Llama, one sequence spread over the ranks.

    torchrun --nproc-per-node 2 examples/train_trainer.py

Three things differ from training on one device. The model is compiled with `model.compile(backend="ring")`: the
Trainer's own torch_compile_backend takes only names it knows. Every rank gets the same batches, by a plain DataLoader,
where a Trainer under torchrun would give each rank its part of the data. And Dynamo keeps the graph in one piece. The
Trainer wraps the model in DDP, which averages gradients that are equal already. Needs `pip install -e '.[hf]'
accelerate`.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch._dynamo
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ringopt

LENGTH, STEPS = 1024, 4


class SameBatches(Trainer):
    """Every rank has every batch."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def sequences() -> list[dict[str, torch.Tensor]]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: LENGTH * STEPS * 2]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> int:
    model = build()
    torch._dynamo.config.optimize_ddp = False  # or Dynamo cuts the graph where DDP's buckets end
    # Nobody reads the logits beside the loss, so they are not gathered.
    model.compile(backend="ring", options={"outputs": "lazy"})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
            use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = SameBatches(model, arguments, train_dataset=sequences())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if trainer.is_world_process_zero():
            print(f"losses {losses}")
            print(*ringopt.reports(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
