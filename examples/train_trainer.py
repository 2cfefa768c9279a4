"""The Trainer of transformers on a byte-level Llama, one sequence spread over the ranks.

    torchrun --nproc-per-node 2 examples/train_trainer.py

Two lines differ from training on one device: the import of ParallelismConfig, and the argument that has it. Its
`cp_size` ranks get the same batches, the model is compiled with backend="ring", and losses, evaluation losses and
gradient norms are those of one process. Needs `pip install -e '.[accelerate]'`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ringopt
from ringopt.integrations.accelerate import ParallelismConfig

LENGTH, STEPS = 1024, 4


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
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
            use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no", disable_tqdm=True,
            parallelism_config=ParallelismConfig(cp_size=ranks),
        )  # fmt: skip
        rows = sequences()
        trainer = Trainer(build(), arguments, train_dataset=rows, eval_dataset=rows[:3])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        evaluated = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            print(f"losses {losses}, then {evaluated} in evaluation")
            print(*ringopt.reports(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
