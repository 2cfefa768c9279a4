"""Do all ranks run the same program on the same inputs?

Asked before a graph first runs: a loader that feeds each rank its own batch, or parameters seeded apart, would give
numbers that look right and are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ringopt.distributed.consistency import compare_ranks, digest
from ringopt.distributed.mesh import Mesh, registered
from ringopt.distributed.standing import Call
from ringopt.ir.canonical_order import Program
from ringopt.tensor.lazy import Lazy
from ringopt.torch_compat.autograd import at_end_of_backward, current_backward
from ringopt.torch_compat.fake_tensors import FakeTensor


@dataclass(frozen=True)
class Compared:
    """What all ranks are to have alike.

    program    the graph before it was sharded
    places     the inputs, in its order
    names      of the inputs
    random     whether the graph draws numbers that must be the same on every rank: then the states of the random number
               generators are compared too
    operators  how often each is called, for errors
    """

    program: Program
    places: Sequence[int]
    names: Sequence[str]
    random: bool = False
    operators: Mapping[str, int] = field(default_factory=dict)


class CheckedInputs:
    """The compiled graph; its inputs are compared over the ranks at the first call, or at every call, as `when` says
    (option check_inputs)."""

    def __init__(self, run: Callable[..., Any], mesh: Mesh, compared: Compared, when: str):
        self.run, self.mesh, self.when = run, mesh, when
        self.program, self.random, self.operators = compared.program, compared.random, compared.operators
        self.places, self.names = tuple(compared.places), tuple(compared.names[place] for place in compared.places)
        self.digest = digest(self.program.text.encode())
        self.asked = False

    def __call__(self, *inputs: Any) -> Any:
        if any(isinstance(x, FakeTensor) for x in inputs):
            return self.run(*inputs)  # torch looks what comes out, as it does between the parts of a graph under DDP
        mesh = registered(self.mesh.name) or self.mesh  # as the operators look it up
        ordered = [inputs[place] for place in self.places]
        with mesh.held():
            mesh.stands(call_of("calls a compiled graph", self.digest, ordered, self.operators), publish=not self.asked)
            return self.checked(mesh, inputs)

    def checked(self, mesh: Mesh, inputs: Sequence[Any]) -> Any:
        end_broken_backward(mesh)
        if self.when == "always" or (self.when == "first" and not self.asked):
            states = [("the random number generator", torch.get_rng_state())] if self.random else []
            if self.random and torch.cuda.is_available():
                states.append(("the CUDA random number generator", torch.cuda.get_rng_state()))
            names = (*self.names, *(name for name, _ in states))
            values = [_compared(value) for value in (*(inputs[place] for place in self.places), *dict(states).values())]
            compare_ranks(mesh, self.digest, names, values, self.program)
            self.asked = True
        with mesh.unbroken():
            outputs = self.run(*inputs)
        watch_backward(mesh, outputs)
        return outputs


def call_of(doing: str, program: Sequence[int], inputs: Sequence[Any], operators: Mapping[str, int]) -> Call:
    """Of the inputs, those that are no parameters."""
    given = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter)]
    sizes = tuple(f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in given)
    return Call(doing, str(program[0]), sizes, torch.is_grad_enabled(), operators)


def watch_backward(mesh: Mesh, outputs: Sequence[Any]) -> None:
    """Hears when the backward of the program that made `outputs` begins. Nobody is told of an error in its midst (no
    memory left for a product), but what was to be called at its end is not called then."""
    for node in {x.grad_fn for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None}:
        node.register_prehook(partial(begin_backward, mesh))


def begin_backward(mesh: Mesh, gradients: Sequence[Any]) -> None:
    """Enters this backward among those of the mesh, until autograd has ended it."""
    if torch.compiler.is_compiling():  # by compiled autograd, whose passes have no such end
        return
    task, backwards = current_backward(), mesh.backwards
    if task is not None and task not in backwards:
        with mesh.held():  # until the end of the backward
            backwards.add(task)
        at_end_of_backward(partial(backwards.discard, task))


def end_broken_backward(mesh: Mesh) -> None:
    """Outside of all backwards, what has not ended was cut short."""
    if mesh.backwards and current_backward() is None:
        mesh.backwards.clear()
        mesh.cut_short("an earlier backward was cut short by an error", "an error in a backward", later=True)


def _compared(value: Any) -> Any:
    """Of a tensor of which each rank has its own rows, what the ranks must have alike."""
    return repr(value.shard.spread) if isinstance(value, Lazy) else value
