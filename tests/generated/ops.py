"""Ops of generated programs: a table of functions that draw one expression.

An expression is text, so that a program that fails can be read, shrunk and pasted. `t` is a value of any rank;
`p(8, 8)` is a parameter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

WIDTH, HEADS, WORDS = 8, 2, 7
HEAD = WIDTH // HEADS


@dataclass(frozen=True)
class Draw:
    """Random arguments for an op on a value of `shape`."""

    random: random.Random
    shape: tuple[int, ...]

    def one(self, *options: object) -> object:
        return self.random.choice(options)

    def below(self, count: int) -> int:
        return self.random.randrange(count)

    def dim(self) -> int:
        """From the front or from the back."""
        dim = self.below(len(self.shape))
        return dim - self.one(0, len(self.shape))  # type: ignore[operator]

    def dims(self) -> list[int]:
        """One to all of them."""
        return sorted(self.random.sample(range(len(self.shape)), 1 + self.below(len(self.shape))))

    def at(self, dim: int, what: str) -> str:
        """`t` indexed along one dim."""
        dim %= len(self.shape)
        return f"t[{', '.join([':'] * dim + [what])}]"

    def along(self, dim: int, made: str) -> str:
        """A 1-D value of the length of a dim, as a column of `t`. `made` has its length as {n}."""
        dim %= len(self.shape)
        sizes = [self.shape[dim] if other == dim else 1 for other in range(len(self.shape))]
        return f"{made.format(n=self.shape[dim])}.view({sizes})"

    def index(self, dim: int) -> str:
        """Rows of a dim, as many as there are."""
        n = self.shape[dim]
        what = self.one("torch.arange({n} - 1, -1, -1)", "(torch.arange({n}) * 3) % {n}", "torch.arange({n}) // 2")
        return f"({what.format(n=n)})"  # type: ignore[attr-defined]

    def part(self, dim: int) -> str:
        """A slice that leaves something."""
        n = self.shape[dim]
        first, last = sorted(self.random.sample(range(n + 1), 2))
        return str(self.one(f"{first}:{last}", f"{first}:", f":{last}", f"{first - n}:" if first < n else ":", "::2",
                            f"{min(first, n - 1)}::2"))  # fmt: skip


Piece = Callable[[Draw], str]


def reduced(d: Draw, call: str) -> str:
    """`call` with a reduction over dims in place of {}, put beside `t` again."""
    sign, one = d.one("+", "*", "-"), d.dim()
    if "{one}" not in call:
        return f"t {sign} {call.format(dims=d.dims())}"
    if d.below(2):
        return f"t {sign} {call.format(one=one)}"
    return f"t {sign} {call.format(one=one).replace(', True', '')}.unsqueeze({one})"


def of_rows(d: Draw, call: str) -> str:
    """Of [B, C, rest]: of [1, C, H, W], torch's own backward is wrong where the gradient is channels last (CPU). In one
    piece: of a transposed value, torch's fake kernel and its real one differ about the strides of what they return."""
    if len(d.shape) < 4:
        return call.format("t.contiguous()")
    return f"{call.format('t.flatten(2).contiguous()')}.view({list(d.shape)})"


def over(call: str) -> Piece:
    return lambda d: reduced(d, call)


#: ops on a value of any rank that return one of its shape
OPS: dict[str, Piece] = {
    # pointwise
    "tanh": lambda d: "t.tanh() * 2",
    "gelu": lambda d: "F.gelu(t)",
    "clamp": lambda d: "t.clamp(-1, 1.5)",
    "where": lambda d: "torch.where(t > 0, t, t * 0.1)",
    "scalar parameter": lambda d: "t * p().sigmoid()",
    "parameter of the last dim": lambda d: f"t * p({d.shape[-1]}) + p({d.shape[-1]})",
    "parameter along a dim": lambda d: f"t + {d.along(d.dim(), 'p({n})')}",
    "parameter of the whole": lambda d: f"t + p{tuple(d.shape[1:])}",
    "positions": lambda d: f"t * {d.along(d.dim(), '(torch.arange({n}, dtype=t.dtype) / {n}).cos()')}",
    "linspace": lambda d: f"t + {d.along(d.dim(), 'torch.linspace(0, 1, {n}, dtype=t.dtype)')}",
    "masked by position": lambda d: f"t.masked_fill({d.along(d.dim(), '(torch.arange({n}) % 3 == 1)')}, 0.3)",
    "masked, expanded": lambda d: f"t * {d.along(d.dim(), '(torch.arange({n}) % 3 == 1)')}.expand_as(t)",
    "new values": lambda d: f"t + t.new_ones({d.shape[-1]}) + torch.zeros_like(t)",
    "through float": lambda d: "t * (t > 0).float()",
    "through integers": lambda d: "t + (t * 2).round().long().clamp(0, 3)",
    "complex": lambda d: "torch.view_as_real(torch.complex(t, t * 0.5) * torch.complex(t, -t)).sum(-1)",
    "outer difference": lambda d: "(t.unsqueeze(-1) - t.unsqueeze(-2)).tanh().sum(-1)",
    # reductions, put beside the value again
    "sum": over("t.sum({dims}, keepdim=True) / 5"),
    "mean": over("t.mean({dims}, keepdim=True)"),
    "mean of one": over("t.mean({one}, True)"),
    "sum of all": lambda d: "t * t.sum().tanh()",
    "mean of all": lambda d: "t - t.mean()",
    "amax": over("t.amax({dims}, keepdim=True)"),
    "amin of one": over("t.amin({one}, True)"),
    "max": over("t.max({one}, True).values"),
    "index of max": over("t.max({one}, True).indices"),
    "min": over("torch.min(t, {one}, True)[0]"),
    "max of all": lambda d: "t / (t.abs().max() + 1)",
    "argmax": over("(t.argmax({one}, True) / 5)"),
    "argmax of all": lambda d: "t + t.argmax() / 50",
    "any": over("(t > 1).any({one}, True)"),
    "all": over("(t > -1).all({one}, True)"),
    "count": over("(t > 0).sum({dims}, keepdim=True)"),
    "var": lambda d: f"t / (1 + t.var({d.dims()}, keepdim=True, correction=0))",
    "std": lambda d: f"t / (1 + t.std({d.dims()}, keepdim=True, correction=0))",
    "var_mean": lambda d: (
        f"(lambda v: (t - v[1]) / (1 + v[0]))(torch.var_mean(t, {d.dims()}, keepdim=True, correction=0))"
    ),
    "logsumexp": over("t.logsumexp({dims}, keepdim=True)"),
    "norm": lambda d: f"t / (1 + t.norm(dim={d.dims()}, keepdim=True))",
    "norm of an order": lambda d: (
        f"t / (1 + torch.linalg.vector_norm(t, {d.one('1', '2', 'torch.inf', '3')}, {d.dim()}, True))"
    ),
    "normalize": lambda d: f"F.normalize(t, dim={d.dim()})",
    "prod": over("t.tanh().prod({one}, True)"),
    "median": over("t.median({one}, True).values"),
    "nansum": over("t.nansum({one}, True).tanh()"),
    "aminmax": lambda d: f"t - torch.aminmax(t, dim={d.dim()}, keepdim=True).min",
    "sum to a vector": lambda d: "t + t.flatten(0, -2).sum(0)",
    # along a dim
    "softmax": lambda d: f"t * t.softmax({d.dim()})",
    "log_softmax": lambda d: f"t.log_softmax({d.dim()}) / 3",
    "cumsum": lambda d: f"t.cumsum({d.dim()}) / 4",
    "cumprod": lambda d: f"t.tanh().cumprod({d.dim()})",
    "cummax": lambda d: f"t.cummax({d.dim()}).values",
    "logcumsumexp": lambda d: f"t.logcumsumexp({d.dim()}) / 3",
    "flip": lambda d: f"t.flip({d.dims()})",
    "roll": lambda d: f"t.roll({d.one(1, -1, 2, 5, -4)}, {d.dim()})",
    "roll two": lambda d: "t.roll((1, -2), (0, -1))",
    "roll all": lambda d: "t.roll(3)",
    "sort": lambda d: f"t.sort({d.dim()}).values",
    "argsort": lambda d: f"t + t.argsort({d.dim()}) / 9",
    "topk": lambda d: f"t + t.topk(1, {d.dim()}).values",
    "diff": lambda d: f"t + torch.diff(t, dim={(dim := d.dim())}, prepend=t.narrow({dim}, 0, 1))",
    "glu": lambda d: f"F.glu(torch.cat([t, t.sin()], {(dim := d.dim())}), {dim})",
    "triangle": lambda d: f"t.{d.one('tril', 'triu')}({d.one(0, 1, -1)})",
    # picked out and put together
    "a row": lambda d: f"t + {d.at(dim := d.dim(), str(d.below(d.shape[dim])))}.unsqueeze({dim})",
    "a row, kept": lambda d: f"t + t.narrow({(dim := d.dim())}, {d.below(d.shape[dim])}, 1)",
    "rows summed": lambda d: f"t + {d.at(dim := d.dim(), d.part(dim))}.mean({dim}, True)",
    "rows and nothing": lambda d: f"t + F.pad({d.at(len(d.shape) - 2, '1:')}, (0, 0, 0, 1))",
    "index_select": lambda d: f"t.index_select({(dim := d.dim())}, {d.index(dim)})",
    "indexed": lambda d: d.at(dim := d.dim(), d.index(dim)),
    "gather": lambda d: f"t.gather({(dim := d.dim())}, {d.along(dim, d.index(dim))}.expand_as(t) % {d.shape[dim]})",
    "gather by sorted": lambda d: f"t.gather({(dim := d.dim())}, t.argsort({dim}))",
    "take_along": lambda d: f"torch.take_along_dim(t, t.argmax({(dim := d.dim())}, True), {dim}) + t",
    "boolean rows": lambda d: f"t + {d.at(dim := d.dim(), f'torch.arange({d.shape[dim]}) % 2 == 0')}.mean({dim}, True)",
    "cat turned": lambda d: f"torch.cat([{d.at(dim := d.dim(), '1:')}, {d.at(dim, ':1')}], {dim})",
    "cat halves": lambda d: f"torch.cat(t.chunk(2, {(dim := d.dim())})[::-1], {dim})",
    "split": lambda d: (
        f"torch.cat([s * (i + 1) for i, s in enumerate(t.split({1 + d.below(4)}, {(dim := d.dim())}))], {dim})"
    ),
    "unbind": lambda d: f"torch.stack(t.unbind({(dim := d.dim())})[::-1], {dim})",
    "stack": lambda d: f"torch.stack([t, t.sin()], {(dim := d.dim())}).sum({dim})",
    "repeat": lambda d: f"t.repeat({[2] + [1] * (len(d.shape) - 1)})[{d.shape[0]}:]",
    "repeat rows": lambda d: f"torch.cat([t] * 2, {(dim := d.dim())}).narrow({dim}, 1, {d.shape[dim]})",
    "interleaved": lambda d: f"t.repeat_interleave(2, {(dim := d.dim())}).narrow({dim}, 1, {d.shape[dim]})",
    "pad": lambda d: (
        f"F.pad(t, {d.one((1, -1), (0, 0, 1, -1), (0, 0, -1, 1), (0, 0, 2, -2))}, value={d.one(0.0, 0.5)})"
    ),
    "unfold": lambda d: "F.pad(t, (0, 0, 2, 0)).unfold(-2, 3, 1).sum(-1)",
    # written into
    "a row written": lambda d: f"put(t, {d.below(len(d.shape))}, {d.one(0, -1)}, 0.5)",
    "rows written": lambda d: (
        f"put(t, {(dim := d.below(len(d.shape)))}, slice(0, {1 + d.below(d.shape[dim])}), t.sin())"
    ),
    "rows added": lambda d: f"add_to(t, {(dim := d.below(len(d.shape)))}, slice({d.below(d.shape[dim])}, None))",
    "filled where": lambda d: "masked(t * 1, t > 0.5)",
    "scattered": lambda d: f"t.scatter({(dim := d.dim())}, t.argmax({dim}, True), 0.5)",
    "scatter_add": lambda d: f"t.scatter_add({(dim := d.dim())}, t.argsort({dim}), t.sin())",
    "index_add": lambda d: f"t.index_add({(dim := d.dim())}, {d.index(dim)} % {d.shape[dim]}, t.cos())",
    "index_copy": lambda d: f"t.index_copy({(dim := d.dim())}, torch.tensor([0]), t.narrow({dim}, 0, 1) * 2)",
    "index_fill": lambda d: f"t.index_fill({d.dim()}, torch.tensor([0]), 0.5)",
    "scatter_reduce": lambda d: (
        f"t.scatter_reduce({(dim := d.dim())}, t.argsort({dim}), t.sin(), {d.one('amax', 'sum')!r})"
    ),
    # products
    "linear": lambda d: f"F.linear(t, p({d.shape[-1]}, {d.shape[-1]}), {d.one('None', f'p({d.shape[-1]})')})",
    "matmul": lambda d: f"t @ p({d.shape[-1]}, {d.shape[-1]})",
    "matmul by a vector": lambda d: f"t * (t @ p({d.shape[-1]})).unsqueeze(-1)",
    "vector by matmul": lambda d: f"t + (p({d.shape[-2]}) @ t).unsqueeze(-2)",
    "from the left": lambda d: f"p({d.shape[-2]}, {d.shape[-2]}) @ t",
    "gram": lambda d: f"t + (t @ t.mT).tanh() @ t / {d.shape[-2]}",
    "gram of channels": lambda d: f"t @ (t.mT @ t).tanh() / {d.shape[-2]}",
    "einsum": lambda d: f"torch.einsum('...d,de->...e', t, p({d.shape[-1]}, {d.shape[-1]}))",
    "einsum sums": lambda d: "t + torch.einsum('...nd->...d', t).unsqueeze(-2) / 5",
    "einsum of two": lambda d: "torch.einsum('...nd,...md->...nm', t, t.cos()).softmax(-1) @ t",
    "cosine": lambda d: f"t * F.cosine_similarity(t, t.sin(), dim={(dim := d.dim())}).unsqueeze({dim})",
    "cdist": lambda d: "t + torch.cdist(t + 1, t.sin()).mean(-1, True)",
    "tensordot": lambda d: f"torch.tensordot(t, p({d.shape[-1]}, {d.shape[-1]}), 1)",
    # layers
    "layer_norm": lambda d: f"F.layer_norm(t, {d.shape[-1:]}, p({d.shape[-1]}), p({d.shape[-1]}))",
    "layer_norm of two dims": lambda d: f"F.layer_norm(t, {d.shape[-2:]})",
    "rms_norm": lambda d: f"F.rms_norm(t, {d.shape[-1:]}, p({d.shape[-1]}))",
    "batch_norm": lambda d: of_rows(d, f"F.batch_norm({{}}, None, None, p({d.shape[1]}), training=True)"),
    "group_norm": lambda d: f"F.group_norm(t, {1 if d.shape[1] % 2 else 2}, p({d.shape[1]}))",
    "instance_norm": lambda d: of_rows(d, "F.instance_norm({})"),
    "prelu": lambda d: "F.prelu(t, p(1))",
    # regions
    "detached": lambda d: "t * t.detach()",
    "no_grad": lambda d: "t + without_grad(lambda: t * t)",
    "used twice": lambda d: "(lambda u: u * u.sin() + u)(t.exp().clamp(max=3))",
    "looked up": lambda d: f"t + F.embedding((t[..., 0] > 0).long(), p(2, {d.shape[-1]}))",
    "one_hot": lambda d: f"t + F.one_hot(t.argmax(-1), {d.shape[-1]})",
    "bucketize": lambda d: "t + torch.bucketize(t.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=t.dtype))",
    "fft": lambda d: f"torch.fft.fft(t, dim={d.dim()}).real / 3",
    "through a view of integers": lambda d: "t.view(torch.int64).view(t.dtype)",
}
