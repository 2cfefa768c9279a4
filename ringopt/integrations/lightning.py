"""Context parallelism for Lightning's Trainer and for Fabric, by one argument.

    from ringopt.integrations.lightning import RingStrategy

    Trainer(strategy=RingStrategy(cp_size=2), devices=4)  # or Fabric(strategy=FabricRingStrategy(cp_size=2))

`cp_size` ranks share each sequence; the others are data parallel. The Trainer's strategy compiles the steps of a
LightningModule with backend="ring", Fabric's the module that `setup` gets. Both are DDP over all ranks, which averages
gradients. Samplers are told of the data-parallel ranks only, so that ranks of a sequence have the same batch.

`sync_dist=True` reduces over all ranks: a mean is right, a sum counts each sequence `cp_size` times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringopt.integrations.chosen import check_options, chosen_options
from ringopt.output.printable import logger
from ringopt.tensor.lazy import Lazy, whole
from ringopt.torch_compat.dynamo import is_compiled, leave_graphs_whole_in_ddp
from ringopt.torch_compat.pytree import tree_map_only

log = logger(__name__)

# Methods of a LightningModule that Dynamo is to call, not to trace: they look at signatures and talk to the Trainer.
LEFT_ALONE = ("log", "log_dict", "print", "manual_backward", "optimizers", "lr_schedulers")


class Shared:
    """How ranks share a sequence, of a strategy that has devices and nodes. `options` are those of backend="ring", but
    for `mesh`; where they, `ringopt.defaults` and RINGOPT_OPTIONS leave them open, `outputs` is "lazy", and
    `sync_gradients` False. `cp_size=None`: all ranks. Raises ValueError and OptionError."""

    num_nodes: int
    num_processes: int
    global_rank: int
    root_device: torch.device

    def __init__(self, cp_size: int | None = None, options: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        if cp_size is not None and cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, but got {cp_size}")
        check_options(options, "Lightning")
        super().__init__(**arguments)
        self._cp_size, self.options = cp_size, options
        self._mesh: DeviceMesh | None = None

    @property
    def cp_size(self) -> int:
        """Ranks that share a sequence."""
        ranks = self.num_nodes * self.num_processes
        size = self._cp_size or ranks
        if ranks % size:
            raise ValueError(f"cp_size={size} on {ranks} ranks: devices times num_nodes has to be a multiple of it")
        return size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self.cp_size
        return {"num_replicas": self.num_nodes * self.num_processes // size, "rank": self.global_rank // size}

    @property
    def mesh(self) -> DeviceMesh:
        """Of dims "dp" and "cp"."""
        if self._mesh is None:
            size = self.cp_size
            shape = (self.num_nodes * self.num_processes // size, size)
            self._mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("dp", "cp"))
        return self._mesh

    def compiling(self, model: torch.nn.Module, averaged: bool) -> dict[str, Any]:
        """Arguments of torch.compile for the `model`."""
        leave_graphs_whole_in_ddp()
        log.info("%s runs on %d ranks a sequence", type(model).__name__, self.cp_size)
        return {"backend": "ring", "options": chosen_options(self.options, self.mesh["cp"], averaged)}


class RingStrategy(Shared, DDPStrategy):
    """Of Lightning's Trainer. The other arguments are those of its DDPStrategy."""

    strategy_name = "ring"
    _compiled_here = False

    def setup(self, trainer: Any) -> None:
        """Compiles the steps, but those of a module that is compiled already."""
        model = self.lightning_module
        if model._compiler_ctx is None:
            averaged = trainer.state.fn == TrainerFn.FITTING
            from_compiled(torch.compile(model, **self.compiling(model, averaged)))
            for name in LEFT_ALONE:
                setattr(model, name, torch.compiler.disable(getattr(model, name)))
            self._compiled_here = True
        super().setup(trainer)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """What is returned to the user may be read by one rank alone."""
        return tree_map_only(Lazy, whole, super().predict_step(*args, **kwargs))

    def teardown(self) -> None:
        """The module is left as it came."""
        if self._compiled_here:
            model = to_uncompiled(self.lightning_module)
            for name in LEFT_ALONE:
                delattr(model, name)
            self._compiled_here = False
        super().teardown()


class FabricRingStrategy(Shared, FabricDDPStrategy):
    """Of Fabric. The other arguments are those of its DDPStrategy."""

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Compiles the module, but one that is compiled already."""
        if not is_compiled(module):
            module.compile(**self.compiling(module, averaged=True))
        return super().setup_module(module)
