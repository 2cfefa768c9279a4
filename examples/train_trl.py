"""TRL's SFTTrainer with LoRA on packed documents, one packed sequence spread over the ranks.

    torchrun --nproc-per-node 2 examples/train_trl.py

Two lines differ from training on one device, as in train_trainer.py; packing, which other context parallelism refuses,
stays exact, for masks are read off the program. Needs `pip install -e '.[accelerate]' trl peft`.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ringopt
from ringopt.integrations.accelerate import ParallelismConfig

LENGTH, STEPS, WORDS = 256, 4, 100


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: nothing is downloaded."""
    known = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def documents() -> Dataset:
    """Of 20 to 80 words, counting up."""
    texts = [" ".join(f"w{(i + j) % WORDS}" for j in range(20 + 7 * i % 61)) for i in range(80)]
    return Dataset.from_list([{"text": text} for text in texts])


def main() -> int:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 2, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=STEPS, packing=True, max_length=LENGTH, per_device_train_batch_size=1, logging_steps=1,
            learning_rate=1e-2, use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[], save_strategy="no",
            disable_tqdm=True, parallelism_config=ParallelismConfig(cp_size=ranks),
        )  # fmt: skip
        trainer = SFTTrainer(
            LlamaForCausalLM(config), arguments, train_dataset=documents(), processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
        )  # fmt: skip
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if trainer.is_world_process_zero():
            print(f"losses {losses}")
            print(*ringopt.reports(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
