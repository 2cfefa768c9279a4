"""Do all ranks run the same program on the same inputs?

Asked before a graph first runs: a loader that feeds each rank its own batch, or parameters seeded apart, would give
numbers that look right and are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ringopt.distributed.mesh import Mesh
from ringopt.distributed.same import compare, digest
from ringopt.lazy import Lazy


class CheckedInputs:
    """The compiled graph; its inputs are compared over the ranks at the first call, or at every call.

    `program` is the text of the graph before it was sharded, `names` those of its inputs. With `random` the states of
    the random number generators are compared too: the graph draws numbers that must be the same on every rank.
    """

    def __init__(
        self, run: Callable[..., Any], mesh: Mesh, program: str, names: Sequence[str], when: str, random: bool = False
    ):
        self.run, self.mesh, self.names, self.when, self.random = run, mesh, tuple(names), when, random
        self.program = digest(program.encode())
        self.asked = False

    def __call__(self, *inputs: Any) -> Any:
        if any(isinstance(x, FakeTensor) for x in inputs):
            return self.run(*inputs)  # torch looks what comes out, as it does between the parts of a graph under DDP
        if self.when == "always" or (self.when == "first" and not self.asked):
            states = [("the random number generator", torch.get_rng_state())] if self.random else []
            if self.random and torch.cuda.is_available():
                states.append(("the CUDA random number generator", torch.cuda.get_rng_state()))
            names, values = (*self.names, *(name for name, _ in states)), (*inputs, *(state for _, state in states))
            compare(self.mesh, self.program, names, [told(value) for value in values])
            self.asked = True
        with self.mesh.unbroken():
            return self.run(*inputs)


def told(value: Any) -> Any:
    """Of a tensor of which each rank has its own rows, what the ranks must have alike."""
    return repr(value.shard.spread) if isinstance(value, Lazy) else value
