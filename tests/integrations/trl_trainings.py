"""Trainings with TRL and peft, as those of trainings.py."""

from __future__ import annotations

import tempfile
from typing import Any

import ringopt
from tests.integrations.trainings import Training, build, launched, logged, samples, shared_folder

WORDS = [f"w{i}" for i in range(60)]


def tokenizer() -> Any:
    """One token a word, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def common(case: Training, mesh: dict[str, int] | None, folder: str) -> dict[str, Any]:
    """Arguments that SFTConfig and DPOConfig share."""
    from ringopt.integrations.accelerate import ParallelismConfig

    config = {} if mesh is None else {"parallelism_config": ParallelismConfig(**mesh, options=case.options)}
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "max_steps": case.steps, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.5, "bf16": False,
        "gradient_checkpointing": False, **case.arguments, **config,
    }  # fmt: skip


def supervised(case: Training, mesh: dict[str, int] | None) -> dict[str, Any]:
    """SFTTrainer; data "completions" has a loss of the second half only; model "lora" has a frozen base."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    with launched(), tempfile.TemporaryDirectory() as own:
        rows = [{"input_ids": x["input_ids"]} for x in samples("equal", 24)]
        if case.data == "completions":
            for row in rows:
                half = len(row["input_ids"]) // 2
                row["completion_mask"] = [0] * half + [1] * (len(row["input_ids"]) - half)
        set_seed(0)
        lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)}
        given = common(case, mesh, shared_folder(own))
        trainer = SFTTrainer(
            build("llama"), SFTConfig(**given, max_length=128), train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:5]), processing_class=tokenizer(),
            **(lora if case.model == "lora" else {}),
        )  # fmt: skip
        return outcome(trainer)


def preferred(case: Training, mesh: dict[str, int] | None) -> dict[str, Any]:
    """DPOTrainer with a reference model."""
    import random

    from datasets import Dataset
    from transformers import set_seed
    from trl import DPOConfig, DPOTrainer

    with launched(), tempfile.TemporaryDirectory() as own:
        draw = random.Random(1)

        def text(words: int) -> str:
            return " ".join(draw.choices(WORDS, k=words))

        rows = [{"prompt": text(9), "chosen": " " + text(12), "rejected": " " + text(12)} for i in range(8)]
        set_seed(0)
        given = common(case, mesh, shared_folder(own))
        trainer = DPOTrainer(
            build("llama"), build("llama"), args=DPOConfig(**given), train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:3]), processing_class=tokenizer(),
        )  # fmt: skip
        return outcome(trainer)


def outcome(trainer: Any) -> dict[str, Any]:
    before = len(ringopt.reports())
    trainer.train()
    found = logged(trainer)
    found["eval"] = trainer.evaluate()
    reports = ringopt.reports()[before:]
    found["metrics"] = [
        {name: entry[name] for name in entry if name in ("num_tokens", "mean_token_accuracy", "rewards/margins")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    found["sites"] = [site.strategy for report in reports for site in report.sites if site.refusal is None]
    found["refused"] = [str(report.refusal) for report in reports if report.refusal]
    found["reports"] = [str(report) for report in reports]
    return found
