"""Do all ranks run the same program on the same inputs?

Asked before a graph first runs, and of the batch at every call: a loader that feeds each rank its own batch, or
parameters seeded apart, would give numbers that look right and are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ringopt.distributed.consistency import compare_ranks, digest
from ringopt.distributed.mesh import Mesh, registered
from ringopt.distributed.roll_call.batch import Batch, begin_batch, described
from ringopt.distributed.roll_call.entrance import COMPARES, enter_together
from ringopt.distributed.roll_call.origins import origins_of, version
from ringopt.distributed.standing import Call
from ringopt.errors import RefusedError
from ringopt.ir.canonical_order import Program
from ringopt.tensor.lazy import Lazy
from ringopt.torch_compat.autograd import at_end_of_backward, current_backward, has_tangent
from ringopt.torch_compat.fake_tensors import FakeTensor


@dataclass(frozen=True)
class Places:
    """Of a graph: `inputs` in the order of the program, of which `batch` are what it is called with, no parameters and
    buffers; `local`, outputs that are this rank's rows, and no other's."""

    inputs: Sequence[int]
    batch: Collection[int]
    local: Collection[int]


@dataclass(frozen=True)
class Compared:
    """What all ranks are to have alike.

    program    the graph before it was sharded
    places     of inputs and outputs
    names      of the inputs
    random     whether the graph draws numbers that must be the same on every rank: then the states of the random number
               generators are compared too
    operators  how often each is called, for errors
    """

    program: Program
    places: Places
    names: Sequence[str]
    random: bool = False
    operators: Mapping[str, int] = field(default_factory=dict)


class CheckedInputs:
    """The compiled graph; its inputs are compared over the ranks as `when` says (option check_inputs): at the first
    call, or at every call, or all at the first and digests of the batch at every one that follows."""

    def __init__(self, run: Callable[..., Any], mesh: Mesh, compared: Compared, when: str):
        self.run, self.mesh, self.when = run, mesh, when
        self.program, self.random, self.operators = compared.program, compared.random, compared.operators
        self.places, self.names = compared.places, tuple(compared.names[place] for place in compared.places.inputs)
        self.batch = [place for place in self.places.inputs if place in self.places.batch]
        self.names_in_batch = [compared.names[place] for place in self.batch]
        self.digest = digest(self.program.text.encode())
        self.asked = False

    def __call__(self, *inputs: Any) -> Any:
        if any(isinstance(x, FakeTensor) for x in inputs):
            return self.run(*inputs)  # torch looks what comes out, as it does between the parts of a graph under DDP
        mesh = registered(self.mesh.name) or self.mesh  # as the operators look it up
        ordered = [inputs[place] for place in self.places.inputs]
        with mesh.held():
            mesh.stands(call_of("calls a compiled graph", self.digest, ordered, self.operators), publish=not self.asked)
            return self.checked(mesh, inputs)

    def checked(self, mesh: Mesh, inputs: Sequence[Any]) -> Any:
        refuse_tangents(self.names, [inputs[place] for place in self.places.inputs])
        end_broken_backward(mesh)
        if self.when == "always" or (self.when != "never" and not self.asked):
            self.compare(mesh, inputs)
            self.asked, digested = True, False
        else:
            digested = self.when == "every"
        with mesh.unbroken():
            before = [version(inputs[place]) for place in self.batch]
            if digested:
                begin_batch(mesh, self.batch_of(mesh, inputs))
            outputs = self.run(*inputs)
        if self.when == "every":
            origins_of(mesh).note(self.made(inputs, before, outputs))
        watch_backward(mesh, outputs)
        return outputs

    def compare(self, mesh: Mesh, inputs: Sequence[Any]) -> None:
        """All that goes in, parameters and generators too."""
        enter_together(mesh, COMPARES)
        states = self.generators()
        given = [inputs[place] for place in self.places.inputs]
        values = [_compared(value) for value in (*given, *states.values())]
        compare_ranks(mesh, self.digest, (*self.names, *states), values, self.program)

    def generators(self) -> dict[str, torch.Tensor]:
        """States of the generators that the ranks are to have alike, by name."""
        states = {"the random number generator": torch.get_rng_state()} if self.random else {}
        if self.random and torch.cuda.is_available():
            states["the CUDA random number generator"] = torch.cuda.get_rng_state()
        return states

    def batch_of(self, mesh: Mesh, inputs: Sequence[Any]) -> Batch:
        given, origins = [inputs[place] for place in self.batch], origins_of(mesh)
        made = {place: origin for place, x in enumerate(given) if (origin := origins.of(x)) is not None}
        states = self.generators()  # behind the inputs, so no place of theirs is another
        values = [_compared(x) for x in (*given, *states.values())]
        return Batch.of(self.digest[0], (*self.names_in_batch, *states), values, made)

    def made(
        self, inputs: Sequence[Any], before: Sequence[int | None], outputs: Sequence[Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What a call has returned, and what it has written of its batch: ranks that called alike have it alike."""
        given = {id(x) for x in inputs}
        for place, x in enumerate(outputs):
            if place not in self.places.local and id(x) not in given and is_plain(x):
                yield f"output {place}", x
        for place, then in zip(self.batch, before, strict=True):
            if is_plain(inputs[place]) and version(inputs[place]) != then:
                yield f"input {place}", inputs[place]


def refuse_tangents(names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Raises RefusedError where an input has a forward-mode gradient: operators that exchange rows would lose it."""
    for name, x in zip(names, inputs, strict=True):
        if has_tangent(x):
            raise RefusedError(
                f"input {name} has a forward-mode gradient (torch.autograd.forward_ad), which does not pass through a "
                "graph that is sharded: call the program without torch.compile there, or take gradients backward"
            )


def is_plain(value: Any) -> bool:
    """Whether `value` is a tensor that this rank holds as a whole."""
    return isinstance(value, torch.Tensor) and not isinstance(value, Lazy)


def call_of(doing: str, program: Sequence[int], inputs: Sequence[Any], operators: Mapping[str, int]) -> Call:
    """Of the inputs, those that are no parameters."""
    given = [x for x in inputs if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter)]
    return Call(doing, str(program[0]), tuple(map(described, given)), torch.is_grad_enabled(), operators)


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
