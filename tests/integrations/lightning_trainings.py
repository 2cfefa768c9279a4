"""Trainings with Lightning's Trainer and with Fabric, as those of trainings.py."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import ringopt
from ringopt.integrations.lightning import FabricRingStrategy, RingStrategy
from tests.integrations.trainings import Training, as_launched, build, padded, samples, shared_folder


class Module(lightning.LightningModule):
    """A causal language model, whose loss is logged."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = build(kind)
        self.seen: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("eval_loss", self.model(**batch, use_cache=False).loss, sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.model(**batch, use_cache=False).logits

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.seen["grad_norm"].append(float(torch.stack(norms).norm()))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen["loss"].append(float(self.trainer.callback_metrics["loss"]))


def loader(per_rank: int, count: int, kind: str, alone: bool, shuffled: bool) -> Any:
    """Where ranks train, Lightning puts in a sampler, which shuffles; one process draws the same order."""
    rows: Any = samples(kind, count)
    sampler = {"sampler": DistributedSampler(rows, 1, 0, shuffle=shuffled)} if alone else {}
    return DataLoader(rows, batch_size=per_rank, collate_fn=padded, **sampler)


def fitted(case: Training, mesh: dict[str, int] | None) -> dict[str, Any]:
    """What the Trainer logs, and what it predicts; `mesh`: the number of ranks a sequence, None on one process. Without
    ranks of data parallelism, two batches of one sample are one of two."""
    ranks = dist.get_world_size()
    replicas = 1 if mesh is None else ranks // mesh["cp_size"]
    with as_launched(), tempfile.TemporaryDirectory() as own:
        strategy: Any = "auto" if mesh is None else RingStrategy(**mesh, options=case.options)
        before = len(ringopt.reports())
        trainer = lightning.Trainer(
            accelerator="cpu", devices=ranks, strategy=strategy, max_steps=case.steps, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            default_root_dir=shared_folder(own), num_sanity_val_steps=0, gradient_clip_val=0.5, **case.arguments,
        )  # fmt: skip
        module = Module(case.model)
        data = [loader(2 // replicas, 2 * n, case.data, mesh is None, n == 8) for n in (8, 3)]
        trainer.fit(module, *data)
        found: dict[str, Any] = {**module.seen, "eval": trainer.validate(module, data[1], verbose=False)[0]}
        if replicas == 1:
            found["predictions"] = torch.cat(trainer.predict(module, data[1]))
        found["weights"] = {name: value.detach() for name, value in module.named_parameters()}
        found["left"] = module._compiler_ctx is None
    return {**found, **of_reports(before)}


def fabricated(case: Training, mesh: dict[str, int] | None) -> dict[str, Any]:
    """A loop with Fabric."""
    ranks = dist.get_world_size()
    replicas = 1 if mesh is None else ranks // mesh["cp_size"]
    with as_launched():
        strategy: Any = "auto" if mesh is None else FabricRingStrategy(**mesh, options=case.options)
        before = len(ringopt.reports())
        fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, **case.arguments)
        fabric.launch()
        model = build(case.model)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        found: dict[str, Any] = {"loss": [], "grad_norm": []}
        for batch in fabric.setup_dataloaders(loader(2 // replicas, 2 * case.steps, "equal", mesh is None, False)):
            loss = model(**batch, use_cache=False).loss
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            found["loss"].append(float(fabric.all_reduce(loss.detach())))
            found["grad_norm"].append(float(norm))
    return {**found, **of_reports(before)}


def of_reports(before: int) -> dict[str, Any]:
    reports = ringopt.reports()[before:]
    return {
        "sites": [site.strategy for report in reports for site in report.sites if site.refusal is None],
        "refused": [str(report.refusal) for report in reports if report.refusal],
        "reports": [str(report) for report in reports],
    }
