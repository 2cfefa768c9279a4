"""Modules at random, as users write them around attention, called several times with arguments of several kinds.

class Module(nn.Module):                   calls:  module(ids, given=memory), module(ids, given=memory, seen=mask), ...
    def forward(self, ids, given, seen=None, *, start=0, twice=False):

An encoder and a decoder of lengths of their own, caches, tied weights, averages of weights, checkpoints, graph breaks,
steps of an optimizer between calls. Sizes coincide: batch, heads, width and a length are often one number, and lengths
are such that ranks have one row, or none, or one more than others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.generated.drawing import INVALID, NAMES

WORDS, ROOM = 7, 48  # ROOM: rows of a cache, and of weights that lengths cut

PROJECTED = "q, k, v = heads(F.linear(x, self.p(3 * W, W)), 3)"

# What a checkpoint reads is bound where it is made: eager computes it again with what the name means by then.
ATTENTIONS = (
    f"{PROJECTED}; x = x + merge(sdpa(q, k, v, is_causal=True))",
    f"{PROJECTED}; x = x + merge(sdpa(q, k, v))",
    f"{PROJECTED}; x = x + merge((q @ k.mT / 2).softmax(-1) @ v)",
    f"{PROJECTED}; x = x + merge(sdpa(q, k, v, None if seen is None else seen[:, None, None]))",
    f"{PROJECTED}; hidden = torch.ones(n, n).triu(1).bool()\n"
    "if seen is not None:\n    hidden = hidden | ~seen[:, None, None]\n"
    "x = x + merge((q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v)",
    f"{PROJECTED}; x = x + merge(sdpa(q, k, v, self.p(ROOM, ROOM)[:n, :n]))",
    f"{PROJECTED}; x = x + merge(sdpa(q, k, v, self.p(H, ROOM, 1)[:, :n]))",
    f"{PROJECTED}; x = x + merge((q @ k.mT + self.p(ROOM)[:n]).softmax(-1) @ v)",
    "(q,), (k, v) = heads(F.linear(x, self.p(W, W)), 1), heads(F.linear(given, self.p(2 * W, W)), 2); "
    "x = x + merge(sdpa(q, k, v))",
    "(q,), (k, v) = heads(F.linear(x, self.p(W, W)), 1), heads(F.linear(given, self.p(2 * W, W)), 2); "
    "some = given.sum(-1) > 0; some[:, 0] = True; x = x + merge(sdpa(q, k, v, some[:, None, None]))",
    f"y, x = x, given; {PROJECTED}; given = x + merge(sdpa(q, k, v)); x = y",
    f"{PROJECTED}; k, v = self.keep(k, v); x = x + merge(sdpa(q, k, v))",
    f"{PROJECTED}; at = torch.arange(n) + start; self.keys.index_copy_(2, at, k.detach()); "
    "self.values.index_copy_(2, at, v.detach()); "
    "x = x + merge(sdpa(q, self.keys, self.values, torch.arange(ROOM) <= at[:, None]))",
    "u = self.p(W, W)\ndef block(t, u=u):\n    h, = heads(F.linear(t, u), 1)\n"
    "    return t + merge(sdpa(h, h, h, is_causal=True))\n"
    "x = checkpoint(block, x, use_reentrant=False)",
    f"with torch.no_grad():\n    {PROJECTED}; still = merge(sdpa(q, k, v))\nx = x + still",
    "y = x.transpose(0, 1); h, = heads(y, 1); x = x + merge(sdpa(h, h, h)).transpose(0, 1)",
    "h = heads(x, 1)[0].transpose(1, 2); x = x + sdpa(h, h, h).flatten(2)",
)  # fmt: skip

STEPS = (
    "x = F.layer_norm(x, (W,), self.p(W))",
    "x = x + F.gelu(F.linear(x, self.p(W, W), self.p(W)))",
    "x = x + F.linear(x, self.table).softmax(-1) @ self.table",
    "u = self.p(W, W); x = checkpoint(lambda t, u=u: t + F.silu(F.linear(t, u)).mean(1, True), x, use_reentrant=False)",
    "torch._dynamo.graph_break()",
    "with torch.no_grad():\n    self.average.lerp_(self.table, 0.1)\nx = x + F.embedding(ids, self.average)",
    "x = x + F.embedding(torch.arange(n) + start, self.p(ROOM, W))",
    "x = x + self.p(ROOM, W)[:n]",
    "x = x * self.p(ROOM)[:n, None].tanh()",
    "x = x + self.p(ROOM, ROOM)[:n, :n] @ x / n",
    "u = self.p(W, W); x = x + u @ x / n if n == W else x * 1.1",
    "x = x.mT if n == W else x",
    "x = x.transpose(0, 1) if n == B else x",
    "x = x + x[:, 0] if n == B else x",
    "x = x * 1.5 if twice else x - 0.1",
    "x = x * (1 + start / 9)",
    "x = x + given.mean(1, True)",
    "x = torch.cat([given[:, :1], x], 1)[:, :n]",
    "x = x + given if given.shape == x.shape else x",
    "x = x * seen[..., None] if seen is not None else x",
    "x = x + x.detach().cumsum(1) / n",
    "x = x - x.mean((0, 1))",
    "x = x + x.flip(1)",
    "x = x + (x @ given.mT).softmax(-1) @ given",
    "x = x.roll(1, 1)",
    "x = x + x[:, -1:]",
    "x = F.pad(x, (0, 0, 1, 0))[:, :-1] + x",
    "x = x + x.gather(1, (ids % n)[..., None].expand(-1, -1, W))",
    "y = x * 1; y[:, 0] = 0.5; x = y",
    "for some in x.split(3, 1):\n    some.add_(0.1)" ,
)  # fmt: skip

LOSSES = (
    "x.square().mean()",
    "F.cross_entropy(F.linear(x, self.table).flatten(0, 1), ids.flatten())",
    "F.cross_entropy(F.linear(x, self.table)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction='sum')",
    "(x * given[:, :1]).sum() / n",
)

RETURNS = (
    "{'loss': loss, 'hidden': (x, [x.mT])}",
    "Found(loss, x[:, 0])",
    "loss",
    "loss, x",
    "(loss, x, given * 2)",
    "{'loss': loss, 'none': None, 'count': n, 'average': self.average}",
    "x",
)


class Found(NamedTuple):
    """What some models return."""

    loss: Tensor
    first: Tensor


@dataclass(frozen=True)
class Sizes:
    """Batch, heads of four or the whole width, width."""

    batch: int
    width: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 4)


@dataclass(frozen=True)
class Call:
    """Lengths of `ids` and of `given`; whether there is a mask; `learns`: the weights move after it."""

    rows: int
    others: int
    seen: bool
    start: int
    twice: bool
    training: bool
    grad: bool
    learns: bool


@dataclass(frozen=True)
class Written:
    """`lines` of a forward, and how it is called."""

    lines: tuple[str, ...]
    end: tuple[str, str]
    sizes: Sizes
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        body = ["n = ids.shape[1]", "x = F.embedding(ids, self.table)", *self.lines]
        body += [f"loss = {self.end[0]}", f"return {self.end[1]}"]
        lines = "\n".join(f"    {line}" for text in body for line in text.split("\n"))
        signature = "def forward(self, ids, given, seen=None, *, start=0, twice=False):"
        return "\n".join((f"# {self.sizes}", signature, lines, *(f"# {call}" for call in self.calls)))

    def module(self) -> Module:
        sizes = {"B": self.sizes.batch, "W": self.sizes.width, "H": self.sizes.heads, "ROOM": ROOM}
        names = {**NAMES, **sizes, "checkpoint": checkpoint, "Found": Found}
        exec(compile(str(self), "<generated>", "exec"), names)
        return Module(names["forward"], self.sizes, self.calls[0])


class Module(nn.Module):
    """Asks for its parameters in order; those are made by running it once."""

    def __init__(self, program: Any, sizes: Sizes, first: Call):
        super().__init__()
        self.draw, self.asked, self.program, self.known = (
            torch.Generator().manual_seed(7),
            0,
            program,
            nn.ParameterList(),
        )
        self.makes = False
        self.table = self.p(WORDS, sizes.width, made=True)
        self.register_buffer("average", self.table.detach() * 0.5)
        cache = torch.zeros(sizes.batch, sizes.heads, ROOM, min(4, sizes.width), dtype=torch.float64)
        self.register_buffer("keys", cache)
        self.register_buffer("values", cache + 1)
        self.held = (cache[:, :, :0], cache[:, :, :0])
        self.makes, kept = True, {name: buffer.clone() for name, buffer in self.named_buffers()}
        with torch.no_grad():
            args, keywords = arguments(sizes, first)
            self(*args, **keywords)
        self.makes, self.held = False, (cache[:, :, :0], cache[:, :, :0])
        self.load_state_dict({**self.state_dict(), **kept})

    def p(self, *shape: int, made: bool = False) -> Tensor:
        if made or self.makes:
            value = nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=self.draw) * 0.4)
            if made:
                return value
            self.known.append(value)
        self.asked += 1
        return self.known[self.asked - 1]

    def keep(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far; gradients go to the new ones."""
        before, values = self.held
        k, v = torch.cat([before, k], 2), torch.cat([values, v], 2)
        self.held = k.detach(), v.detach()
        return k, v

    def forward(self, ids: Tensor, given: Tensor, seen: Tensor | None = None, **keywords: Any) -> Any:
        self.asked = 0
        return self.program(self, ids, given, seen, **keywords)


def arguments(sizes: Sizes, call: Call) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Of one call: what is given by place and by keyword. What is not said is not given."""
    ids = torch.arange(sizes.batch * call.rows).view(sizes.batch, call.rows) * 5 % WORDS
    drawn = torch.Generator().manual_seed(call.others)
    given = torch.randn(sizes.batch, call.others, sizes.width, dtype=torch.float64, generator=drawn).requires_grad_(
        call.grad
    )
    seen = (torch.arange(call.rows) + torch.arange(sizes.batch)[:, None]) % 4 != 3
    seen[:, 0] = True
    keywords = {"seen": seen} if call.seen else {}
    keywords |= {"start": call.start} if call.start else {}
    keywords |= {"twice": True} if call.twice else {}
    return (ids, given), keywords


def draw(seed: int) -> Written:
    """The program and its calls. Lines that eager does not take in one of the calls are left out."""
    chosen = random.Random(seed)
    width = chosen.choice((4, 8, 8, 16))
    sizes = Sizes(chosen.choice((1, 2, 2, 3, 4, width // 4 or 1)), width)
    pool = chosen.sample((1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, sizes.batch, width), chosen.choice((1, 2, 2, 3)))
    others = chosen.sample((1, 3, 4, 8, 11, width, pool[0]), chosen.choice((1, 2)))
    infers, masks, moves = chosen.random() < 0.3, chosen.random() < 0.5, chosen.random() < 0.3
    calls = tuple(
        Call(
            rows=pool[i] if i < len(pool) else chosen.choice(pool),
            others=chosen.choice(others),
            seen=masks and chosen.random() < 0.7,
            start=chosen.choice((0, 0, 3)) if moves else 0,
            twice=chosen.random() < 0.2,
            training=not infers or chosen.random() < 0.6,
            grad=not (infers and chosen.random() < 0.4),
            learns=chosen.random() < 0.3,
        )
        for i in range(len(pool) + chosen.choice((1, 2)))
    )
    program = Written((), (chosen.choice(LOSSES), chosen.choice(RETURNS)), sizes, calls)
    kinds = [STEPS] * chosen.randint(1, 3) + [ATTENTIONS] * chosen.randint(1, 2)
    chosen.shuffle(kinds)
    for kind in kinds:
        longer = replace(program, lines=(*program.lines, chosen.choice(kind)))
        program = longer if is_valid(longer) else program
    return program


def is_valid(program: Written) -> bool:
    """Whether eager takes all calls, and finds finite numbers."""
    try:
        found = run(program.module(), program)
    except INVALID:
        return False
    return all(x.isfinite().all() for values in found for x in values)


def run(module: Module, program: Written, compiled: Any = None) -> list[list[Tensor]]:
    """After each call: what it returned, all gradients, and the state."""
    return [one_call(module, module if compiled is None else compiled, program.sizes, call) for call in program.calls]


def one_call(module: Module, function: Any, sizes: Sizes, call: Call) -> list[Tensor]:
    module.train(call.training)
    args, keywords = arguments(sizes, call)
    with torch.set_grad_enabled(call.grad):
        outputs = [torch.as_tensor(x) for x in tree_leaves(function(*args, **keywords)) if x is not None]
    led = [x for x in outputs if x.requires_grad]
    if led:
        torch.autograd.backward(led, [torch.linspace(0.5, 1.5, x.numel()).to(x).view(x.shape) for x in led])
    held: Sequence[Tensor] = (*module.parameters(), args[1])
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in held]
    there = torch.tensor([x.grad is not None for x in held])
    if call.learns:
        with torch.no_grad():
            for weight in module.parameters():
                if weight.grad is not None:
                    weight -= 0.01 * weight.grad.clamp(-1, 1)
        module.zero_grad()
    state = (*module.buffers(), *module.held, *module.parameters())
    return [x.detach().clone() for x in (*outputs, *gradients, there, *state)]
