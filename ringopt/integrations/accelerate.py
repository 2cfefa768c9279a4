"""Context parallelism for accelerate, and so for the Trainer of transformers and for TRL, by one argument.

    from ringopt.integrations.accelerate import ParallelismConfig

    TrainingArguments(..., parallelism_config=ParallelismConfig(cp_size=2))  # or Accelerator(parallelism_config=...)

`prepare` compiles the model with backend="ring" over mesh dim "cp". Its ranks are to the program what accelerate and
the Trainer know of tensor parallelism: each has the same batch, the whole loss and the whole outputs. So the config
shows them their number as `tp_size`, and 1 as `cp_size`: what these libraries do for their own context parallelism
(inputs cut in place, causal masks only, a loss that is a part) would be wrong here. `ring_size` is the number itself.

`gather_for_metrics` takes samples (tensors with a batch dim, objects) from one rank of each sequence. Numbers without
dims it takes from all processes, as `gather` and `reduce` do, and as with tensor parallelism, of which the Trainer and
TRL know: a mean is right, a sum counts each sequence `ring_size` times, and is to be divided by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, DynamoBackend, gather, is_compiled_module, recursively_apply

from ringopt.integrations.chosen import check_options, chosen_options
from ringopt.torch_compat.dynamo import is_compiled, leave_graphs_whole_in_ddp

log = get_logger(__name__)

UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


@dataclass
class ParallelismConfig(accelerate.ParallelismConfig):
    """accelerate's own, where `cp_size` ranks share each sequence by ringopt.

    `options` are those of backend="ring", but for `mesh`. Where they, `ringopt.defaults` and RINGOPT_OPTIONS leave them
    open, `outputs` is "lazy" (logits that nobody reads are not gathered), and `sync_gradients` is False under DDP and
    FSDP, which average over these ranks too. Raises ValueError and OptionError.
    """

    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        asked = self.cp_size if self.cp_size is not None else int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))
        if asked < 1:
            raise ValueError(f"cp_size must be at least 1, but got {asked}")
        self.ring_size: int = asked
        self.cp_size: int = 1
        super().__post_init__()
        check_options(self.options, "accelerate")
        if asked == 1:
            return
        if self.tp_size > 1 or self.sp_size > 1:
            raise ValueError(
                f"cp_size={asked} beside tp_size={self.tp_size}, sp_size={self.sp_size}: accelerate is told of the cp "
                "ranks as if they were its tp, and sp is DeepSpeed's own way to share a sequence; set both to 1"
            )
        if self.cp_handler is not None:
            raise ValueError("cp_handler is for accelerate's own context parallelism; pass options={...} instead")
        self._sizes["cp"] = asked
        self.tp_size: int = asked

    @property
    def tp_enabled(self) -> bool:
        """Of the model's weights, which are whole here."""
        return self.ring_size == 1 and self.tp_size > 1

    @property
    def non_dp_dim_names(self) -> list[str]:
        return ["cp"] if self.ring_size > 1 else super().non_dp_dim_names

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [*(["dp_shard"] if self.dp_shard_enabled else []), *(["cp"] if self.ring_size > 1 else [])]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*self.dp_dim_names, *(["cp"] if self.ring_size > 1 else [])]

    def __repr__(self) -> str:
        sizes = f"dp_replicate_size={self.dp_replicate_size}, dp_shard_size={self.dp_shard_size}"
        return f"ringopt's ParallelismConfig({sizes}, cp_size={self.ring_size}, options={self.options})"

    def build_device_mesh(self, device_type: str) -> Any:
        processes = PartialState().num_processes
        if self.ring_size > 1 and self.total_size != processes:
            raise ValueError(
                f"{self} is for {self.total_size} processes, and {processes} run: launch as many (torchrun "
                f"--nproc-per-node {self.total_size}), or set dp_replicate_size (DDP) or dp_shard_size (FSDP2) so that "
                "the product of the sizes is their number"
            )
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: accelerate.Accelerator) -> None:
        if self.ring_size == 1:
            super()._validate_accelerator(accelerator)
            return
        kind = accelerator.distributed_type
        if kind in UNSUPPORTED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
            raise ValueError(
                f"cp_size={self.ring_size} with {kind}: ringopt goes beside DDP and FSDP2 (fsdp_version=2)"
            )
        if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                f"cp_size={self.ring_size} compiles the model by itself; leave torch_compile and dynamo_backend out "
                '(options={"inner_backend": ...} is the compiler of what is sharded)'
            )
        attach(accelerator, self)


def attach(accelerator: accelerate.Accelerator, config: ParallelismConfig) -> None:
    """Has `accelerator` compile what it prepares, and gather metrics once for each sequence."""
    ring = Ring(accelerator, config)
    leave_graphs_whole_in_ddp()
    accelerator.prepare_model = ring.preparing(accelerator.prepare_model)
    accelerator.prepare = ring.preparing_all(accelerator.prepare)
    accelerator.prepare_data_loader = ring.loading(accelerator.prepare_data_loader)
    accelerator.gather_for_metrics = ring.gather_for_metrics


@dataclass(frozen=True)
class Ring:
    """What an accelerator does where a sequence is shared."""

    accelerator: accelerate.Accelerator
    config: ParallelismConfig

    def compile(self, model: torch.nn.Module, averaged: bool) -> None:
        """In place, before a wrapper that averages gradients over all ranks; what is compiled already stays."""
        if is_compiled_module(model) or is_compiled(model):
            return
        mesh = self.accelerator.torch_device_mesh["cp"]
        model.compile(backend="ring", options=chosen_options(self.config.options, mesh, averaged))
        log.info(f"ringopt: {type(model).__name__} runs on {mesh.size()} ranks a sequence")

    def preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
            self.compile(model, averaged=not evaluation_mode)
            return prepare(model, device_placement, evaluation_mode)

        return prepare_model

    def preparing_all(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """FSDP2 wraps what it is given without `prepare_model`."""

        def prepare_all(*args: Any, **kwargs: Any) -> Any:
            for model in args if self.accelerator.is_fsdp2 else ():
                if isinstance(model, torch.nn.Module):
                    self.compile(model, averaged=True)
            return prepare(*args, **kwargs)

        return prepare_all

    def loading(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_data_loader(loader: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = self.accelerator.dataloader_config
            if chosen.dispatch_batches:
                raise ValueError(
                    f"dispatch_batches=True cuts a batch over all processes; with cp_size={self.config.ring_size} the "
                    "ranks of a sequence need the same one: set dispatch_batches=False"
                )
            chosen.dispatch_batches = False  # None would mean True of a dataset without a length
            return prepare(loader, *args, **kwargs)

        return prepare_data_loader

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """accelerate's, of samples over the ranks that have different batches."""
        if not use_gather_object:
            try:
                data = recursively_apply(self.gathered, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
        if use_gather_object:
            data = self.gathered_objects(input_data)
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        # The last batch was filled up with samples from the beginning.
        if use_gather_object:
            return data[: state.remainder]
        return recursively_apply(lambda x: x[: state.remainder], data)

    @property
    def replicas(self) -> int:
        return int(self.config.data_parallel_size)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 0:
            found: torch.Tensor = gather(x)
            return found
        if self.replicas == 1:
            return x.clone()
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.replicas)]
        dist.all_gather(parts, x, group=self.accelerator.torch_device_mesh["dp"].get_group())
        return torch.cat(parts)

    def gathered_objects(self, data: Any) -> list[Any]:
        parts: list[Any] = [data]
        if self.replicas > 1:
            parts = [None] * self.replicas
            dist.all_gather_object(parts, data, group=self.accelerator.torch_device_mesh["dp"].get_group())
        return [item for part in parts for item in part]
