"""Trainings with the real libraries that run alike on one process and on ranks: what they log is compared."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist

import ringopt

VOCAB = 64
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

EAGER = {"inner_backend": "eager"}
LONG = 600.0  # seconds, for compilations on a busy machine


@dataclass(frozen=True)
class Training:
    """A case: what a Trainer is given beside defaults, the same for the reference."""

    model: str = "llama"
    data: str = "padded"
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: dict(EAGER))
    steps: int = 3
    resume: bool = False
    predict: bool = False


@contextmanager
def as_launched() -> Iterator[None]:
    """As torchrun sets the environment, and quietly."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    if size != "1":
        os.environ |= dict(zip(VARIABLES, (rank, rank, size, size, "localhost", "29511"), strict=True))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        with torch._dynamo.config.patch(optimize_ddp=torch._dynamo.config.optimize_ddp):  # which is set in here
            yield
    finally:
        logging.disable(logging.NOTSET)
        for name in VARIABLES:
            os.environ.pop(name, None)


@contextmanager
def launched() -> Iterator[None]:
    """And accelerate forgets what it knew of another environment."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        with as_launched():
            yield
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def build(name: str) -> torch.nn.Module:
    """A model of two layers with weights that are the same everywhere."""
    import transformers

    torch.manual_seed(0)
    small = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    usual = {**small, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256}
    latent = {
        **usual, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    hybrid = {
        **usual, **experts, "shared_expert_intermediate_size": 16, "head_dim": 8, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    windowed = {**usual, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    kinds = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", usual),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", windowed),
        "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", hybrid),
        "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", latent),
        "classifier": ("LlamaConfig", "LlamaForSequenceClassification", {**usual, "pad_token_id": 0, "num_labels": 3}),
    }
    config, model, sizes = kinds[name]
    built: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return built


def samples(kind: str, count: int) -> list[dict[str, Any]]:
    """Of several lengths, with parts that no loss is taken of."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        length = {"equal": 40, "twelve lengths": 24 + 3 * (i % 12)}.get(kind, 24 + 8 * (i % 3))
        ids = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        ignored = 0 if kind == "equal" else i % 4
        labels = [i % 3] if kind == "labelled" else [-100] * ignored + ids[ignored:]
        made.append({"input_ids": ids, "labels": labels})
    return made


def padded(features: list[dict[str, Any]], length: int = 40) -> dict[str, torch.Tensor]:
    """To one length, so that graphs are of one."""
    rows = [(x["input_ids"], x["labels"], length - len(x["input_ids"])) for x in features]
    by_token = len(rows[0][1]) > 1
    return {
        "input_ids": torch.tensor([ids + [0] * more for ids, _, more in rows]),
        "labels": torch.tensor([labels + [-100] * more * by_token for _, labels, more in rows]).squeeze(1),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * more for ids, _, more in rows]),
    }


def padded_to_longest(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return padded(features, max(len(x["input_ids"]) for x in features))


def collator(kind: str) -> Any:
    from transformers import DataCollatorWithFlattening

    return {"packed": DataCollatorWithFlattening(), "twelve lengths": padded_to_longest}.get(kind, padded)


def accuracy(found: Any) -> dict[str, float]:
    """Counts what it is given, too: a rank's predictions are there once."""
    logits, labels = found.predictions, found.label_ids
    hits = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
    return {"accuracy": float(hits.mean()), "samples": float(len(logits))}


def trained(case: Training, mesh: dict[str, int] | None) -> dict[str, Any]:
    """What a Trainer logs and predicts; `mesh`: the sizes of a ParallelismConfig, None on one process."""
    from transformers import Trainer, TrainingArguments, set_seed

    from ringopt.integrations.accelerate import ParallelismConfig

    with launched(), tempfile.TemporaryDirectory() as own:
        folder = shared_folder(own)
        config = {} if mesh is None else {"parallelism_config": ParallelismConfig(**mesh, options=case.options)}
        given = {
            "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": case.steps,
            "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True,
            "save_strategy": "steps" if case.resume else "no", "save_steps": case.steps - 1, "max_grad_norm": 0.5,
        }  # fmt: skip
        arguments = TrainingArguments(folder, **{**given, **case.arguments}, **config)

        def trainer() -> Any:
            set_seed(0)
            metrics = {"compute_metrics": accuracy} if case.predict else {}
            return Trainer(
                build(case.model), arguments, data_collator=collator(case.data), train_dataset=samples(case.data, 16),
                eval_dataset=samples(case.data, 5), **metrics,
            )  # fmt: skip

        first = trainer()
        before = len(ringopt.reports())
        first.train()
        found = logged(first)
        found["eval"] = first.evaluate()
        if case.predict:
            output = first.predict(first.eval_dataset)
            found["predictions"], found["test"] = torch.tensor(output.predictions), output.metrics
        if case.resume:
            dist.barrier() if mesh else None
            again = trainer()
            again.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{case.steps - 1}"))
            found["resumed"] = logged(again)["loss"]
        reports = ringopt.reports()[before:]
        found["weights"] = {name: value.detach() for name, value in first.model.named_parameters()}
        found["sites"] = [site.strategy for report in reports for site in report.sites if site.refusal is None]
        found["refused"] = [str(report.refusal) for report in reports if report.refusal]
        found["reports"] = [str(report) for report in reports[:1]]
        found["graphs"] = len(reports)
    return found


def shared_folder(own: str) -> str:
    """That of rank 0."""
    names = [own]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(names)
    return names[0]


def logged(trainer: Any) -> dict[str, Any]:
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [entry[name] for entry in history] for name in ("loss", "grad_norm")}


def looped(case: Training, mesh: dict[str, int] | None) -> dict[str, Any]:
    """A training loop with accelerate alone; without ranks of data parallelism, a batch of 2 is two batches of 1."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader

    from ringopt.integrations.accelerate import ParallelismConfig

    with launched():
        config = {} if mesh is None else {"parallelism_config": ParallelismConfig(**mesh, options=case.options)}
        sharded = mesh is not None and "dp_shard_size" in mesh
        if sharded:
            config["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        accelerator = fsdp_on_cpu(config) if sharded else Accelerator(cpu=True, **config)
        replicas = 1 if mesh is None else mesh.get("dp_replicate_size", 1) * mesh.get("dp_shard_size", 1)
        model = build(case.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = [padded([x]) for x in samples("equal", 9)]
        loader = DataLoader(data, batch_size=2 // replicas, collate_fn=joined)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found: dict[str, Any] = {"loss": [], "grad_norm": []}
        before = len(ringopt.reports())
        for batch in loader:
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found["loss"].append(float(accelerator.gather(loss.detach()).mean()))
            found["grad_norm"].append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            if len(found["loss"]) == case.steps:
                break
        model.eval()
        with torch.no_grad():
            hits = [accelerator.gather_for_metrics(of_samples(model, batch)) for batch in loader]
        found["per_sample"] = torch.cat(hits)
        found["objects"] = accelerator.gather_for_metrics([accelerator.process_index])
        found["sites"] = [site.strategy for report in ringopt.reports()[before:] for site in report.sites]
    return found


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def of_samples(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A number of each, made of its logits."""
    logits = model(**batch, use_cache=False).logits
    return torch.as_tensor(logits.float().logsumexp(-1).mean(-1))


def fsdp_on_cpu(config: dict[str, Any]) -> Any:
    """accelerate has FSDP2 on GPUs only; here it is told that this is one of them."""
    from unittest.mock import patch

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def of_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, config["fsdp_plugin"]

    with patch.object(AcceleratorState, "__init__", of_fsdp):
        return Accelerator(cpu=True, **config)


def check_alike(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """What was logged at each step, and in evaluations."""
    for name in {"loss", "grad_norm", "resumed"} & set(expected):
        assert found[name] == pytest.approx(expected[name], rel=tolerance), name
    for name in ("eval", "test"):
        measured = [key for key in expected.get(name, {}) if not key.endswith(("runtime", "per_second", "_time"))]
        for key in measured:
            # Absolute, too: rewards are small differences of large log-probabilities.
            assert found[name][key] == pytest.approx(expected[name][key], rel=tolerance, abs=tolerance), key


def check_ranks(ranks: Callable[..., list[Any]], run: Any, case: Training, p: int = 2, **mesh: int) -> Any:
    """That each of `p` ranks logs what one process logs, and that attention was sharded. Gives both."""
    [expected] = ranks(1, run, case, None, timeout=LONG)
    found = ranks(p, run, case, mesh or {"cp_size": p}, timeout=LONG)
    for each in found:
        check_alike(each, expected)
        assert each["sites"] and not each.get("refused")
    return found[0], expected
