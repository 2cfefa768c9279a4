"""Programs at random: attention and steps before, between and after it, as text that is valid in eager.

def program(given, ids, p):
    x = F.embedding(ids, p(7, 8)) + given
    ...
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.generated.ops import OPS, WIDTH, WORDS, Draw
from tests.generated.parts import ATTENTIONS, LAYOUTS, LENGTHS, LOSSES, RETURNS

SHORTEST, LONGEST = 4, 26


@dataclass(frozen=True)
class Program:
    """`lines` between an embedding and a head; `end` is the loss and what is returned."""

    lines: tuple[str, ...]
    end: tuple[str, str]
    batch: int = 2
    length: int = 12
    width: int = WIDTH

    @property
    def names(self) -> dict[str, Any]:
        """What programs call."""
        return dict(NAMES)

    def before(self, line: str) -> str:
        """A line, with what stands before each."""
        return line

    def __str__(self) -> str:
        body = [
            f"# x is [{self.batch}, {self.length}, {self.width}]",
            f"x = F.embedding(ids, p({WORDS}, {self.width})) + given; kept = [x]",
            *map(self.before, self.lines),
            f"logits = F.linear(x, p({WORDS}, {self.width}))",
            *(f"{name} = {name}_of(logits)" for name in ("wanted", "hot") if name in self.end[0]),
            f"loss = {self.end[0]}",
            f"return {self.end[1]}",
        ]
        return "def program(given, ids, p):\n" + "\n".join(f"    {line}" for text in body for line in text.split("\n"))

    @cached_property
    def function(self) -> Any:
        names = self.names
        exec(compile(str(self), "<generated>", "exec"), names)
        return names["program"]

    def inputs(self) -> list[Tensor]:
        """The activations, token ids, then the parameters in the order in which they are asked for."""
        generator = torch.Generator().manual_seed(self.length)
        made = Parameters([], generator)
        given = torch.randn(
            self.batch, self.length, self.width, dtype=torch.float64, generator=generator
        ).requires_grad_()
        ids = torch.randint(0, WORDS, (self.batch, self.length), generator=generator)
        self.function(given, ids, made)
        return [given, ids, *made.known]

    def __call__(self, given: Tensor, ids: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return self.function(given, ids, Parameters(list(parameters)))

    def smaller(self) -> Iterator[Program]:
        """Programs a notch simpler, for shrinking."""
        for k in range(len(self.lines)):
            yield replace(self, lines=self.lines[:k] + self.lines[k + 1 :])
        for end in (("logits.square().mean()", "loss,"), (self.end[0], "loss,"), (LOSS, self.end[1])):
            if end != self.end:
                yield replace(self, end=end)
        if self.batch > 1:
            yield replace(self, batch=1)
        for k, line in enumerate(self.lines):
            parts = line.split("; ")
            if line.startswith("t = "):
                for j in range(1, len(parts) - 1):
                    yield replace(
                        self, lines=(*self.lines[:k], "; ".join(parts[:j] + parts[j + 1 :]), *self.lines[k + 1 :])
                    )


LOSS = "logits.square().mean()"


class Parameters:
    """`p(8, 8)`: the next parameter; made at random where there is a generator."""

    def __init__(self, known: list[Tensor], generator: torch.Generator | None = None):
        self.known, self.generator, self.asked = known, generator, 0

    def __call__(self, *shape: int) -> Tensor:
        if self.generator is not None:
            value = torch.randn(shape, dtype=torch.float64, generator=self.generator) * 0.4
            self.known.append(value.requires_grad_())
        self.asked += 1
        return self.known[self.asked - 1]


# ---- what programs call --------------------------------------------------------------------------------------------
def heads(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[B, S, parts * D] as so many of [B, H, S, D / H]."""
    return tuple(part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in x.chunk(parts, -1))


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def put(t: Tensor, dim: int, rows: Any, value: Any) -> Tensor:
    t, at = t * 1, (slice(None),) * dim + (rows,)
    t[at] = value[at] if isinstance(value, Tensor) else value
    return t


def add_to(t: Tensor, dim: int, rows: Any) -> Tensor:
    t = t * 1
    t[(slice(None),) * dim + (rows,)] += 0.5
    return t


def masked(t: Tensor, mask: Tensor) -> Tensor:
    t[mask] = 0.25
    return t.mul_(2)


def without_grad(make: Any) -> Any:
    with torch.no_grad():
        return make()


def wanted_of(logits: Tensor) -> Tensor:
    """A class for each row, unevenly ignored."""
    b, s, classes = logits.shape
    wanted = torch.arange(b * s).view(b, s) * 3 % classes
    return wanted.masked_fill(torch.arange(s) < s // 3, -100)


def hot_of(logits: Tensor) -> Tensor:
    """Chances of the classes for each row."""
    return (torch.arange(logits.numel(), dtype=logits.dtype).view(logits.shape) * 0.37).sin().softmax(-1)


NAMES = {
    "torch": torch, "F": F, "sdpa": F.scaled_dot_product_attention, "heads": heads, "merge": merge, "put": put,
    "add_to": add_to, "masked": masked, "without_grad": without_grad, "wanted_of": wanted_of,
    "hot_of": hot_of,
}  # fmt: skip


#: what eager says of a line that cannot stand where it was drawn
INVALID = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)


# ---- drawing -------------------------------------------------------------------------------------------------------
class Drawing:
    """Adds lines that run in eager; `x` and `kept` are what they have made so far."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.batch, self.length = self.random.choice((1, 2, 2)), self.random.choice((8, 8, 9, 13))
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.batch, self.length, WIDTH, dtype=torch.float64, generator=generator)
        self.names: dict[str, Any] = {**NAMES, "p": Parameters([], generator), "x": x, "kept": [x]}
        self.lines: list[str] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.names["x"].shape)

    def program(self, most: int) -> Program:
        count, attends = self.random.randint(1, most), self.random.randint(1, (most + 1) // 2)
        kinds = ["step"] * count + ["attention"] * attends
        self.random.shuffle(kinds)
        for kind in kinds:
            self.add(kind)
        loss = self.random.choice(list(LOSSES.values()))(self.draw(self.shape))
        returned = self.random.choice(RETURNS)
        return Program(tuple(self.lines), (loss, returned), self.batch, self.length)

    def add(self, kind: str) -> None:
        for _ in range(30):
            try:
                line = self.line(kind)
                self.run(line)
            except INVALID:
                continue
            self.lines.append(line)
            return

    def line(self, kind: str) -> str:
        if kind == "attention":
            names = list(ATTENTIONS)
            name = self.random.choice(names[:9] if self.random.random() < 0.6 else names)
            return ATTENTIONS[name](self.draw(self.shape))
        chance = self.random.random()
        if chance < 0.25:
            return self.random.choice(list(LENGTHS.values()))(self.draw(self.shape))
        if chance < 0.3:
            return "kept.insert(0, x)"
        if chance < 0.35:
            return "x = x * kept[-1].tanh()"
        return self.in_layout()

    def in_layout(self) -> str:
        """One or two ops on the activations as another layout has them."""
        into, back = self.random.choice(list(LAYOUTS.values()))
        sizes = dict(zip("BSD", self.shape, strict=True), w=self.random.choice((2, 3)))
        text, parts = f"t = {into.format(**sizes)}", list[str]()
        t = eval(text[4:], dict(self.names))
        for _ in range(self.random.randint(1, 2)):
            op = self.random.choice(list(OPS.values()))
            parts.append(f"t = {op(self.draw(tuple(t.shape)))}")
        return "; ".join([text, *parts, f"x = {back.format(**sizes)}"])

    def draw(self, shape: Sequence[int]) -> Draw:
        return Draw(self.random, tuple(shape))

    def run(self, line: str) -> None:
        """Raises one of INVALID where the line cannot stand here, or leaves activations that are of no use."""
        names = {**self.names, "kept": list(self.names["kept"])}
        with torch.no_grad():
            exec(line, names)
        x = names["x"]
        if x.dim() != 3 or (x.shape[0], x.shape[2]) != (self.batch, WIDTH) or not SHORTEST <= x.shape[1] <= LONGEST:
            raise ValueError(f"activations became {list(x.shape)}")
        if x.dtype != torch.float64 or not x.isfinite().all() or x.abs().max() > 1e3:
            raise ValueError("activations are no numbers worth having")
        self.names = names


def draw(seed: int, most: int) -> Program:
    """A program of at most so many steps beside its attentions."""
    return Drawing(seed).program(most)
