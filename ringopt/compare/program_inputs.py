"""What a program is run with: its own tensors, and inputs that are given or made.

    (x, mask), {"x": x, "mask": mask}    tensors, in the order of the program's inputs or by their names
    "inputs.pt"                          a file of torch.save with either of these
    "random", "random:3"                 of the declared shapes, from a seed: normal numbers, and integers from the
                                         range of the program's example inputs, or 0 and 1 where it has none
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from ringopt.errors import ProgramError, first_line
from ringopt.ir.nodes import value_of
from ringopt.torch_compat.fake_tensors import FakeTensor
from ringopt.torch_compat.pytree import tree_leaves

Given: TypeAlias = Sequence[Any] | Mapping[str, Any] | str | Path
RANDOM = re.compile(r"random(?::(\d+))?")


class Inputs:
    """The placeholders of a program, in order: `fixed` have values of its own, `asked` are the caller's; `learnable`
    can have gradients: all but buffers and constants."""

    def __init__(self, program: ExportedProgram | fx.GraphModule):
        graph: fx.Graph = program.graph
        self.program, self.gm = program, program if isinstance(program, fx.GraphModule) else program.graph_module
        self.nodes = graph.find_nodes(op="placeholder")
        self.fixed = dict(fixed_of(program)) if isinstance(program, ExportedProgram) else {}
        self.asked = [node.name for node in self.nodes if node.name not in self.fixed]
        self.learnable = {*self.asked, *(parameters_of(program) if isinstance(program, ExportedProgram) else ())}
        examples = tree_leaves(program.example_inputs or ()) if isinstance(program, ExportedProgram) else []
        self.examples = dict(zip(self.asked, examples, strict=True)) if len(examples) == len(self.asked) else {}
        self.values = {node.name: declared(node) for node in self.nodes}

    def bound(self, given: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
        """Every input by name. Raises ProgramError where they are not those that the program asks for."""
        if isinstance(given, Mapping):
            if set(given) != set(self.asked):
                raise ProgramError(f"inputs {_listed(given)} were given; the program asks for {_listed(self.asked)}")
            found = {name: given[name] for name in self.asked}
        else:
            leaves = tree_leaves(tuple(given))
            if len(leaves) != len(self.asked):
                asked = f"{len(self.asked)}: {_listed(self.asked)}"
                raise ProgramError(f"{len(leaves)} inputs were given; the program asks for {asked}")
            found = dict(zip(self.asked, leaves, strict=True))
        for name, value in found.items():
            check(name, value, self.values[name])
        return found

    def made(self, seed: int) -> dict[str, Any]:
        """Every input by name, at random. Raises ProgramError where a shape is not declared."""
        generator = torch.Generator().manual_seed(seed)
        return {name: drawn(name, self.values[name], self.examples.get(name), generator) for name in self.asked}

    def in_order(self, found: Mapping[str, Any]) -> list[Any]:
        """What its graph is called with: copies, for a program may write to its inputs and buffers."""
        known = {**self.fixed, **found}
        return [copied(known[node.name]) for node in self.nodes]


def fixed_of(program: ExportedProgram) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers and constants, by the names of their placeholders. Raises ProgramError for one without
    numbers."""
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, ConstantArgument):
                yield spec.arg.name, spec.arg.value
            continue
        target = str(spec.target)
        value = program.state_dict.get(target, program.constants.get(target))
        if isinstance(value, FakeTensor) or value is None or (isinstance(value, Tensor) and value.is_meta):
            raise ProgramError(f"the program cannot be run: {target} has no numbers (exported on meta or fake tensors)")
        yield spec.arg.name, value


def parameters_of(program: ExportedProgram) -> Iterator[str]:
    """The names of their placeholders."""
    return (spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.PARAMETER)


def declared(node: fx.Node) -> Any:
    """The value that stands for an input, or None."""
    value = value_of(node)
    return value if value is not None else node.meta.get("example_value")


def check(name: str, value: Any, expected: Any) -> None:
    """Raises ProgramError where a tensor has another size than the program declares, as far as that is fixed."""
    if not isinstance(expected, Tensor):
        return
    sizes = [size if isinstance(size, int) else None for size in expected.shape]
    fits = isinstance(value, Tensor) and len(value.shape) == len(sizes)
    if not fits or any(size not in (None, here) for size, here in zip(sizes, value.shape, strict=True)):
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ProgramError(f"input {name} is {found}; the program takes a tensor {list(expected.shape)}")


def drawn(name: str, expected: Any, example: Any, generator: torch.Generator) -> Any:
    """One input at random; of open sizes those of the example input, and numbers as that."""
    if example is not None and not isinstance(example, Tensor):
        return example
    like = example if example is not None else expected
    if not isinstance(like, Tensor) or not all(isinstance(size, int) for size in like.shape):
        why = "has no fixed shape in the program, so none can be made at random"
        raise ProgramError(f"input {name} {why}; pass tensors")
    size, dtype, device = tuple(like.shape), like.dtype, like.device
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(size, generator=generator, dtype=wide).to(device, dtype)
    known = like is example and not isinstance(like, FakeTensor) and like.numel() and dtype != torch.bool
    low, high = (int(like.min()), int(like.max())) if known else (0, 1)
    return torch.randint(low, high + 1, size, generator=generator).to(device, dtype)


def copied(value: Any) -> Any:
    """A tensor of the same numbers, or the value."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def what_is_given(given: Given) -> Sequence[Any] | Mapping[str, Any] | int:
    """Tensors, or a seed. Raises ProgramError for a file that holds something else; nothing of it is run."""
    if isinstance(given, str) and (random := RANDOM.fullmatch(given)):
        return int(random[1] or 0)
    if isinstance(given, (str, Path)):
        try:
            found = torch.load(given, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            expected = "expected a file of torch.save, or random[:SEED]"
            raise ProgramError(f"inputs: {given} does not exist; {expected}") from None
        except Exception as error:  # whatever an unpickler raises
            raise ProgramError(f"inputs: {given} cannot be read as tensors: {first_line(error)}") from None
        given = (found,) if isinstance(found, Tensor) else found
    if not isinstance(given, (tuple, list, Mapping)):
        kind = type(given).__name__
        raise ProgramError(f"inputs are a tuple or a dict of tensors, or random[:SEED]; found {kind}")
    return given


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"
