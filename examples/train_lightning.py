"""Lightning's Trainer on a byte-level Llama, one sequence spread over the ranks.

    torchrun --nproc-per-node 2 examples/train_lightning.py

Two lines differ from training on one device: the import of RingStrategy, and the argument that has it. Its ranks get
the same batches, and the steps of the module are compiled with backend="ring". Needs `pip install -e '.[lightning]'`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import ringopt
from ringopt.integrations.lightning import RingStrategy

LENGTH, STEPS = 1024, 4


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def sequences() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: LENGTH * STEPS * 2]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH)


def main() -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        strategy=RingStrategy(cp_size=ranks), devices=ranks, accelerator="auto" if torch.cuda.is_available() else "cpu",
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    module = Llama()
    trainer.fit(module, DataLoader(sequences(), batch_size=2))
    if trainer.is_global_zero:
        print(f"losses {module.losses}")
        print(*ringopt.reports(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
