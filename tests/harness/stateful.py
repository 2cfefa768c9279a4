"""Programs that write to what they hold or are given, and return it or parts of it; and what can be told of such a
program from outside: values, gradients, which object each tensor is, whose memory it lies in, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, HEADS, ROOM = 16, 4, 24


class Model(nn.Module):
    """Attention, spelled out where `spelled`, and a `step(self, x)` that makes the outputs."""

    def __init__(self, step: Callable[..., Any], spelled: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.step, self.spelled = step, spelled
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("state", torch.rand(4, WIDTH))
        self.register_buffer("other", torch.rand(4, WIDTH))
        self.register_buffer("cache", torch.zeros(2, ROOM, WIDTH))
        self.loose = torch.zeros(4, WIDTH)  # no buffer
        self.double()
        self.loose = self.loose.double()

    def attention(self, x):
        qkv = self.qkv(x * 1)  # what is saved for the backward is not what is written next
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
        spelled = lambda: (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v  # noqa: E731
        y = spelled() if self.spelled else F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.step(self, x)


def attribute(name):
    """`self.NAME += ...`"""

    def step(m, x):
        y = m.attention(x)
        setattr(m, name, getattr(m, name).__iadd__(y[0, :4].detach()))
        return y

    return step


def counted(m, x):
    if m.training:
        m.count += 1
    return m.attention(x) + m.count


def new_object(m, x):
    m.state = m.state + 1
    return m.attention(x), m.state


def in_no_grad(m, x):
    y = m.attention(x)
    with torch.no_grad():
        m.cache[:, : x.shape[1]] = y
        m.count.data.add_(1)
        m.state.lerp_(y[0, :4], 0.5)
    return y, m.cache[:, : x.shape[1]], m.state


def by_number(m, x):
    y = m.attention(x)
    at = torch.arange(x.shape[1])
    m.cache.index_copy_(1, at, y.detach())
    m.other.scatter_(0, torch.zeros(1, WIDTH, dtype=torch.long), y[0, :1].detach())
    return y, m.cache, m.other.T


def with_gradient(m, x):
    held = m.state.add_(m.attention(x)[0, :4])
    return held * 2, held


def gradient_through_state(m, x):
    s = torch.zeros_like(m.state)
    s.add_(m.attention(x)[0, :4])
    t = s[1:]
    t.mul_(2)
    return s, t, s.T


def swapped(m, x):
    before = m.state.clone()
    m.state.copy_(m.other)
    m.other.copy_(before)
    return m.attention(x), m.other


def old_value(m, x):
    before = torch.empty_like(m.state)
    before.copy_(m.state)
    m.state.add_(1)
    return m.attention(x), before, m.state


def copied_input(m, x):
    y = torch.empty_like(x)
    y.copy_(x)
    return m.attention(x), y


def views_of_one(m, x):
    y = m.attention(x).unflatten(-1, (2, -1)).transpose(1, 2)
    return y, y.transpose(1, 2).flatten(2), y[..., 0]


def parts_of_one(m, x):
    a, b = m.attention(x).chunk(2, -1)
    return a, b.transpose(1, 2), a


def written_view(m, x):
    y = m.attention(x) * 1
    z = y.transpose(1, 2)
    z[:, 1:].mul_(2)
    return y, z


def chained(m, x):
    return m.attention(x).sum(), m.state.mul_(0.5).add_(1), m.state[0], m.state.view(-1)[2:].sin_()


def identities(m, x):
    y = m.attention(x)
    return y, y.contiguous(), y.to(torch.float64), x.contiguous(), x.view(x.shape), m.out.weight, m.out.weight.T


def unseen(m, x):
    m.qkv.weight.data.mul_(0.9)
    with torch.no_grad():
        m.out.weight[0].zero_()
        kept = m.out.bias.copy_(x.mean((0, 1)))
    m.norm.weight.detach().clamp_(0.2, 0.5)
    return m.attention(x) * kept, m.out.weight, m.norm.weight * 2


STEPS: dict[str, Callable[..., Any]] = {
    "returns its input": lambda m, x: (x, m.attention(x)),
    "writes its input": lambda m, x: (m.attention(x), x.add_(1))[0],
    "writes its input, returns it": lambda m, x: (x.add_(1), m.attention(x)),
    "returns a view of its input": lambda m, x: (x[:, 1:], m.attention(x)),
    "writes its input, returns a view": lambda m, x: (x.mul_(2)[:, 1:], m.attention(x), x.mT),
    "writes its input with what was computed": lambda m, x: (x.copy_(m.attention(x).detach()), x[0]),
    "writes a view of its input": lambda m, x: (m.attention(x), x[:, 2:].zero_(), x),
    "returns a buffer that it wrote": lambda m, x: (m.state.add_(1), m.attention(x)),
    "returns a view of a buffer that it wrote": lambda m, x: (m.state.add_(1).view(-1), m.attention(x), m.state.T[1]),
    "counts": counted,
    "buffer +=": attribute("state"),
    "attribute +=": attribute("loose"),
    "another object": new_object,
    "in no_grad": in_no_grad,
    "by number": by_number,
    "weights, unseen by autograd": unseen,
    "with gradient": with_gradient,
    "gradient through state": gradient_through_state,
    "swapped": swapped,
    "old value": old_value,
    "copied input": copied_input,
    "an output and its transpose": lambda m, x: (lambda y: (y, y.transpose(1, 2)))(m.attention(x)),
    "the same output twice": lambda m, x: (lambda y: (y, y))(m.attention(x)),
    "views of one": views_of_one,
    "parts of one": parts_of_one,
    "written view": written_view,
    "chained": chained,
    "identities": identities,
    "batch norm": lambda m, x: m.norm(m.attention(x).mT).mT,
    "batch norm of a written buffer": lambda m, x: (m.norm(m.attention(x).mT), m.norm.num_batches_tracked),
    "log sigmoid": lambda m, x: F.logsigmoid(m.attention(x).mT),
}

LENGTHS = (12, 12, 17)


def told(step: Any, compiled: Any, spelled: bool = False, learns: bool = True) -> tuple[list[Any], list[torch.Tensor]]:
    """What can be told of the program from outside, and its numbers: after each of some calls of two lengths, in train
    and eval by turns."""
    torch._dynamo.reset()
    model = Model(step, spelled)
    call, held = compiled(model), [*model.buffers(), *model.parameters(), model.loose]
    facts: list[Any] = []
    numbers: list[torch.Tensor] = []
    for turn, n in enumerate(LENGTHS):
        model.train(turn % 2 == 0)
        model.zero_grad()
        x = torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
        with torch.set_grad_enabled(learns):
            found = call(x)
            outputs = list(found) if isinstance(found, tuple) else [found]
            learned = [out for out in dict.fromkeys(outputs) if out.requires_grad and not out.is_leaf]
            if learned:
                sum((out * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum() for out in learned).backward()
        now = [*model.buffers(), *model.parameters(), model.loose]
        known = [x, *held, *now, *outputs]
        facts += [[next(i for i, y in enumerate(known) if y is out) for out in (*outputs, *now)]]
        facts += [[next(i for i, y in enumerate(known) if y.data_ptr() == out.data_ptr()) for out in outputs]]
        facts += [[next(i for i, y in enumerate(known) if storage(y) == storage(out)) for out in outputs]]
        facts += [[strides(out) for out in outputs], [out.requires_grad for out in (*outputs, *now)]]
        numbers += [y.detach().clone() for y in (x, *held, *now, *outputs)]
        numbers += [y.grad.clone() for y in model.parameters() if y.grad is not None]
        facts += [[y.grad is not None for y in model.parameters()]]
        with torch.no_grad():  # who holds the same memory sees it
            for out in outputs:
                if not isinstance(out, nn.Parameter):
                    out.data.mul_(2)
            numbers += [y.detach().clone() for y in (x, *now, *outputs)]
            for buffer in model.buffers():
                buffer.detach_()
    return facts, numbers


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def strides(x: torch.Tensor) -> Any:
    """Those that count; of a value with holes in its memory, as what it is a part of may not be here, their order."""
    steps = [(stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    dense = x.numel() == 1 + sum((size - 1) * stride for stride, size in steps)
    return [stride for stride, _ in steps] if dense else sorted(range(len(steps)), key=lambda dim: -steps[dim][0])
