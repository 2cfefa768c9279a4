"""Programs at random that are called several times: at other lengths, in training and evaluation, with state between.

class Program(nn.Module):            calls:  12 rows in training, 30 rows in evaluation, 12 rows in training, ...
    def forward(self, ids): ...

Lines are valid at any length but where eager says no. What a call leaves behind (buffers, gradients that add up) is
part of what is compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from tests.generated.drawing import INVALID, NAMES
from tests.generated.ops import WIDTH, WORDS

ROOM = 64  # rows of the cache

QKV = f"q, k, v = heads(F.linear(x, self.p({3 * WIDTH}, {WIDTH})), 3)"

ATTENTIONS = (
    f"{QKV}; x = x + merge(sdpa(q, k, v, is_causal=True))",
    f"{QKV}; x = x + merge(sdpa(q, k, v))",
    f"{QKV}; i = torch.arange(x.shape[1]); "
    "x = x + merge(sdpa(q, k, v, (i <= i[:, None]) & (i > i[:, None] - 4)))",
    f"{QKV}; x = x + merge((q @ k.mT / 2).softmax(-1) @ v)",
    f"{QKV}; m = x.shape[1]; "
    "x = x + merge((q @ k.mT).masked_fill(torch.ones(m, m).triu(1).bool(), float('-inf')).softmax(-1) @ v)",
    f"{QKV}; m = x.shape[1]; b = (F.pad(t, (0, 0, 0, -m % 4)).unflatten(2, (-1, 4)) for t in (q, k, v)); "
    "x = x + merge(sdpa(*b).flatten(2, 3)[:, :, :m])",
    f"{QKV}; x = x + merge(torch.cat([sdpa(c, k, v) for c in q.split(7, 2)], 2))",
    f"{QKV}; x = x + merge(sdpa(q[:, :, -1:], k, v))",
    f"{QKV}; x = x + merge(sdpa(q, k[:, :, ::2], v[:, :, ::2]))",
    f"{QKV}; (u,) = heads(self.p(3, {WIDTH})[None], 1); "
    "x = x + merge(sdpa(u.expand(x.shape[0], -1, -1, -1), k, v)).mean(1, True)",
    f"{QKV}; i = torch.arange(x.shape[1]) // 5; x = x + merge(sdpa(q, k, v, i[:, None] == i))",
    f"{QKV}; i = torch.arange(x.shape[1]); "
    "x = x + merge(sdpa(q, k, v, self.p(7, 2)[(i - i[:, None]).clamp(-3, 3) + 3].permute(2, 0, 1)))",
)  # fmt: skip

STEPS = (
    f"x = F.layer_norm(x, ({WIDTH},), self.p({WIDTH}))",
    f"x = x + F.gelu(F.linear(x, self.p({WIDTH}, {WIDTH}), self.p({WIDTH})))",
    "x = x[:, 1:]",
    "x = x[:, : -(-x.shape[1] // 2)]",
    "x = x[:, ::2]",
    "x = F.pad(x, (0, 0, 1, 0))[:, :-1]",
    "x = F.pad(x, (0, 0, 0, -x.shape[1] % 3))",
    f"x = torch.cat([self.p(1, 1, {WIDTH}).expand(x.shape[0], -1, -1), x], 1)",
    "x = torch.cat([x, x.sin()], 1)",
    "x = x - x.mean(1, True)",
    "x = x + x.cumsum(1) / x.shape[1]",
    "x = x * torch.arange(x.shape[1], dtype=x.dtype).cos()[:, None]",
    "x = x.narrow(1, 0, x.shape[1])",
    f"x = F.silu(F.conv1d(x.mT, self.p({WIDTH}, 1, 4), padding=3, groups={WIDTH})[..., :x.shape[1]].mT)",
    "x = torch.cat([c.tanh() for c in x.chunk(3, 1)], 1)",
    "x = x.flip(1)",
    "x = x.roll(1, 1)",
)

STATE = (
    "self.count += 1; x = x * (1 + self.count / 50)",
    "self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1); x = x - self.mean",
    "m = x.shape[1]; x = x + self.cache[:, :m] / 5; self.cache[:, :m] = x.detach().mean(0, True).tanh()",
    "m = x.shape[1]; self.cache[:, :m].add_(x.detach()[:1].tanh()); x = x + self.cache[:, :m] / 9",
    "self.total = self.total + x.detach().tanh().sum((0, 1)); x = x + self.total / 99",
    "x = x + self.last[:, None] / 9; self.last = x[:, -1].detach().tanh()",
    "x = x * 1.5 if self.training else x - 0.1",
    f"x = F.batch_norm(x.flatten(0, 1), self.running, self.spread, self.p({WIDTH}), None, self.training).view(x.shape)",
    "self.cache.roll(1, 1); self.cache.mul_(0.5)",
)

RETURNS = ("loss", "loss, x", "loss, x[:, 0]", "loss, self.count", "loss, self.cache, x.mT", "loss, self.mean", "x,")

LENGTHS = (1, 2, 3, 5, 8, 9, 12, 13, 18, 25, 30, 40)


@dataclass(frozen=True)
class Call:
    """`backward` adds to what gradients there are, unless they are set to none before (`zero`)."""

    length: int
    training: bool
    grad: bool
    zero: bool
    backward: bool


@dataclass(frozen=True)
class Several:
    """`lines` of a forward, and how often it is called."""

    lines: tuple[str, ...]
    returned: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        body = [f"x = F.embedding(ids, self.p({WORDS}, {WIDTH}))", *self.lines]
        body += ["loss = x.square().mean()", f"return {self.returned}"]
        lines = "\n".join(f"    {line}" for line in body)
        return f"def forward(self, ids):\n{lines}\n" + "\n".join(f"# {call}" for call in self.calls)

    def module(self) -> Repeated:
        names = dict(NAMES)
        exec(compile(str(self), "<generated>", "exec"), names)
        return Repeated(names["forward"], [call.length for call in self.calls])


class Repeated(nn.Module):
    """Asks for its parameters in order; those are made by running it once, at each length."""

    def __init__(self, forward: Any, lengths: Sequence[int]):
        super().__init__()
        self.known, self.asked, self.program, self.makes = nn.ParameterList(), 0, forward, True
        zeros = torch.zeros(WIDTH, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(()))
        for name in ("mean", "total", "running"):
            self.register_buffer(name, zeros.clone())
        self.register_buffer("spread", zeros + 1)
        self.register_buffer("cache", torch.zeros(1, ROOM, WIDTH, dtype=torch.float64))
        self.register_buffer("last", torch.zeros(2, WIDTH, dtype=torch.float64))
        state = {name: buffer.clone() for name, buffer in self.named_buffers()}
        self.draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            self(ids_of(max(lengths)))
        self.load_state_dict({**self.state_dict(), **state})
        self.makes = False
        del self.draw

    def p(self, *shape: int) -> Tensor:
        if self.makes:
            self.known.append(torch.randn(shape, dtype=torch.float64, generator=self.draw) * 0.4)
        self.asked += 1
        return self.known[self.asked - 1]

    def forward(self, ids: Tensor) -> Any:
        self.asked = 0
        return self.program(self, ids)


def ids_of(n: int) -> Tensor:
    return torch.arange(2 * n).view(2, n) * 5 % WORDS


def draw(seed: int) -> Several:
    """The program and its calls. Lines that eager does not take at one of the lengths are left out."""
    chosen = random.Random(seed)
    pool = chosen.sample(LENGTHS, chosen.choice((2, 3)))
    alternates, infers = chosen.random() < 0.4, chosen.random() < 0.3
    calls = [
        Call(
            length=pool[i] if i < len(pool) else chosen.choice(pool),
            training=not (alternates and i % 2),
            grad=not (infers and chosen.random() < 0.4),
            zero=chosen.random() < 0.5,
            backward=chosen.random() < 0.85,
        )
        for i in range(len(pool) + chosen.choice((1, 2)))
    ]
    kinds = [STEPS] * chosen.randint(0, 3) + [ATTENTIONS] * chosen.randint(1, 2) + [STATE] * chosen.randint(0, 2)
    chosen.shuffle(kinds)
    program = Several((), chosen.choice(RETURNS), tuple(calls))
    for kind in kinds:
        longer = replace(program, lines=(*program.lines, chosen.choice(kind)))
        program = longer if is_valid(longer) else program
    return program


def is_valid(program: Several) -> bool:
    """Whether eager takes it at each length, and finds finite numbers."""
    try:
        module = program.module()
        with torch.no_grad():
            found = [module(ids_of(n)) for n in {call.length for call in program.calls}]
    except INVALID:
        return False
    return all(x.isfinite().all() for outputs in found for x in (outputs if isinstance(outputs, tuple) else (outputs,)))


def run(module: nn.Module, program: Several, compiled: Any = None) -> list[list[Tensor]]:
    """After each call: what it returned, all gradients, and the state."""
    return [one_call(module, module if compiled is None else compiled, call) for call in program.calls]


def one_call(module: nn.Module, function: Any, call: Call) -> list[Tensor]:
    module.train(call.training)
    if call.zero:
        module.zero_grad()
    with torch.set_grad_enabled(call.grad):
        found = function(ids_of(call.length))
    outputs = list(found) if isinstance(found, tuple) else [found]
    led = [x for x in outputs if x.requires_grad]
    if led and call.backward:
        torch.autograd.backward(led, [torch.linspace(0.5, 1.5, x.numel()).to(x).view(x.shape) for x in led])
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in module.parameters()]
    there = torch.tensor([x.grad is not None for x in module.parameters()])
    return [x.detach().clone() for x in (*outputs, *gradients, there, *module.buffers())]


def apart(expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor]]) -> str:
    """Where they differ first; "" where they do not."""
    for number, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        top = max(float(x.abs().max()) for x in ours if x.is_floating_point() and x.numel())
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"call {number}, value {place}: {list(a.shape)} {a.dtype} became {list(b.shape)} {b.dtype}"
            error = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
            if not error <= 1e-8 * max(top, 1e-3):
                return f"call {number}, value {place} of {len(ours)}, {list(a.shape)}: {error:.1e} apart"
    return ""
