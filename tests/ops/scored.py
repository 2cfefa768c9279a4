"""Scores that are changed and weights that are dropped: each case is a mask with its sources, and the same in dense
tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.expr.mask import Mask
from ringopt.expr.simplify import apply, where
from ringopt.expr.terms import Term, affine, axis, load, number, score
from ringopt.ops import operators
from ringopt.ops.ring import VERSION
from tests.context_parallel.reference import Problem, join, rows_of, shard, visible
from tests.harness.threads import ThreadMesh, run_on_threads

DOUBLE, N, HEADS = torch.float64, 17, 4
INF = float("inf")
SCORE = score(DOUBLE)
SEED = torch.tensor(77)


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE, generator=torch.Generator().manual_seed(sum(sizes)))


NOTHING = Mask()


@dataclass(frozen=True)
class Case:
    """`change` and `add` are the mask in dense tensors: of scores [B, H, n, n] and `sources`, whole."""

    mask: Mask = NOTHING
    sources: tuple[Tensor, ...] = ()
    change: Callable[..., Tensor] = lambda scores, *sources: scores
    add: Callable[..., Tensor] = lambda *sources: torch.zeros((), dtype=DOUBLE)
    pattern: str = "full"
    sinks: Tensor | None = None
    dropout_p: float = 0.0

    @property
    def learned(self) -> list[int]:
        return list(self.mask.differentiable)


def of(op: str, *args: Term | float) -> Term:
    return apply(op, args, DOUBLE)


def compare(op: str, *args: Term | float) -> Term:
    return apply(op, args, torch.bool)


KEPT = compare("ne", load(0, [axis("b"), axis("k")], torch.int64), 0)  # a padding vector
PADDING = torch.ones(2, N, dtype=torch.int64)
PADDING[0, :5], PADDING[1, 11:] = 0, 0
UNSEEN = (PADDING == 0)[:, None, None]
FUTURE = ~torch.ones(N, N, dtype=torch.bool).tril()
ABOVE = compare("le", axis("k"), axis("q"))


def filled(fill: float, condition: Term, dtype: torch.dtype = DOUBLE) -> Mask:
    """masked_fill(score, ~condition, fill)."""
    zero = number(0.0, dtype)
    return Mask(bias=where(condition, zero, fill, dtype), score=where(condition, score(dtype), zero, dtype))


SOFTCAP = of("mul", of("tanh", of("mul", SCORE, 0.5)), 2.0)
TEMPERATURE = of("mul", SCORE, load(0, [axis("h")], DOUBLE))
ROWS = load(0, [axis("b"), axis("h"), axis("r"), axis("k")], DOUBLE)

CASES = {
    "softcap": Case(Mask(score=SOFTCAP), change=lambda s: (s * 0.5).tanh() * 2, pattern="causal"),
    "softcap in a window": Case(Mask(score=SOFTCAP), change=lambda s: (s * 0.5).tanh() * 2, pattern="window(5)"),
    "temperature": Case(Mask(score=TEMPERATURE), (draw(HEADS),), lambda s, t: s * t[:, None, None], pattern="causal"),
    "temperature of tokens, and padding": Case(
        Mask(KEPT, score=of("mul", SCORE, load(1, [axis("b"), axis("q")], DOUBLE))),
        (PADDING, draw(2, N)),
        lambda s, _, t: s * t[:, None, :, None],
        lambda *_: torch.zeros(2, 1, 1, N, dtype=DOUBLE).masked_fill(UNSEEN, -INF),
    ),
    "temperature and bias of one source": Case(
        Mask(score=TEMPERATURE, bias=load(0, [axis("h")], DOUBLE)),
        (draw(HEADS),),
        lambda s, t: s * t[:, None, None],
        lambda t: t[:, None, None],
    ),
    "a causal fill": Case(
        filled(-1e9, ABOVE),
        change=lambda s: s.masked_fill(FUTURE, 0.0),
        add=lambda: torch.zeros(N, N, dtype=DOUBLE).masked_fill(FUTURE, -1e9),
    ),
    "sinks": Case(sinks=draw(1, HEADS)),
    "sinks of a batch, causal": Case(sinks=draw(2, HEADS), pattern="causal"),
    "sinks in a window": Case(sinks=draw(1, HEADS), pattern="window(4,both)"),
    "sinks and padding": Case(
        Mask(KEPT),
        (PADDING,),
        add=lambda _: torch.zeros(2, 1, 1, N, dtype=DOUBLE).masked_fill(UNSEEN, -INF),
        pattern="causal",  # the first rows of batch 0 see nothing but the sink
        sinks=draw(1, HEADS),
    ),
    "dropout": Case(dropout_p=0.4),
    "dropout, causal": Case(dropout_p=0.1, pattern="causal"),
    "dropout of everything": Case(dropout_p=1.0),
    "dropout, sinks, softcap": Case(
        Mask(score=SOFTCAP), (), lambda s: (s * 0.5).tanh() * 2, sinks=draw(1, HEADS), dropout_p=0.3, pattern="causal"
    ),
    "rows of a dense bias": Case(Mask(bias=ROWS), (draw(2, HEADS, N, N),), add=lambda bias: bias, pattern="causal"),
    "rows of a bias for all heads": Case(
        Mask(bias=load(0, [affine({}, 0), affine({}, 0), axis("r"), axis("k")], DOUBLE)),
        (draw(1, 1, N, N),),
        add=lambda bias: bias,
    ),
    "rows that scale scores": Case(Mask(score=of("mul", SCORE, ROWS)), (draw(2, HEADS, N, N),), lambda s, t: s * t),
}  # fmt: skip


def filled_case(fill: float, dtype: torch.dtype = DOUBLE) -> Case:
    """Left padding and the future hidden by one finite fill: the first rows of batch 0 weigh all keys alike."""
    hidden = UNSEEN | FUTURE
    mask = filled(fill, apply("logical_and", [KEPT, ABOVE], torch.bool), dtype)
    zeros = torch.zeros(2, 1, N, N, dtype=dtype)
    return Case(mask, (PADDING,), lambda s, _: s.masked_fill(hidden, 0.0), lambda _: zeros.masked_fill(hidden, fill))


FILLS = {f"fill {fill:g}": filled_case(fill) for fill in (-1e4, -1e9, torch.finfo(DOUBLE).min)}


# ---- the three ways of computing it ----------------------------------------------------------------------------------
def dense(case: Case, given: Problem, hidden_is: float = 0.0) -> list[Tensor]:
    """out, gradients of q, k, v, learned sources, sinks: by autograd, in float64."""
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    sources = [x.clone().requires_grad_(i in case.learned) for i, x in enumerate(case.sources)]
    sinks = case.sinks.clone().requires_grad_() if case.sinks is not None else None
    keys, values = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = case.change(q @ keys.mT * given.scale, *sources) + case.add(*sources)
    scores = scores + torch.zeros(N, N, dtype=given.q.dtype).masked_fill(~visible(case.pattern, N, N), -INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None, None].expand(2, HEADS, N, 1)], -1)
    hidden = (scores == -INF).all(-1, keepdim=True) & (hidden_is == 0.0)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)[..., :N]
    if case.dropout_p:
        weights = weights * Dropout(case.dropout_p, SEED).factor(2, HEADS, range(N), range(N), DOUBLE)
    out = weights @ values
    leaves = [q, k, v, *(sources[i] for i in case.learned), *([sinks] if sinks is not None else [])]
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout)]


def on_one_device(case: Case, given: Problem) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    sources = [x.clone().requires_grad_(i in case.learned) for i, x in enumerate(case.sources)]
    sinks = case.sinks.clone().requires_grad_() if case.sinks is not None else None
    seed = SEED if case.dropout_p else None
    out = operators.attention(
        *(q, k, v, None, sources, sinks, seed, case.pattern, case.mask.text, case.dropout_p, given.scale)
    )
    leaves = [q, k, v, *(sources[i] for i in case.learned), *([sinks] if sinks is not None else [])]
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout)]


def over_ranks(case: Case, given: Problem, p: int, layout: str, strategy: str, kernel: str = "auto") -> list[Tensor]:
    """The same in sequence order; parts of sources are summed, rows of sources joined."""
    dims = case.mask.row_dims

    def body(mesh: ThreadMesh) -> tuple[list[Tensor], list[Tensor]]:
        q, k, v, dout = (shard(x, layout, p, mesh.rank) for x in (given.q, given.k, given.v, given.dout))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        mine = torch.tensor(rows_of(layout, N, p, mesh.rank), dtype=torch.int64)
        held = [x.index_select(dims[i], mine) if i in dims else x.clone() for i, x in enumerate(case.sources)]
        sources = [x.requires_grad_(i in case.learned) for i, x in enumerate(held)]
        sinks = case.sinks.clone().requires_grad_() if case.sinks is not None else None
        seed = SEED.clone() if case.dropout_p else None
        out, _ = operators.ring_attention(
            *(*leaves, sources, sinks, seed, N, N, case.pattern, case.mask.text, case.learned, case.dropout_p),
            *(given.scale, layout, layout, strategy, kernel, mesh.name, VERSION),
        )
        read = [*(sources[i] for i in case.learned), *([sinks] if sinks is not None else [])]
        grads = torch.autograd.grad(out, (*leaves, *read), dout)
        return [out.detach(), *grads[:3]], list(grads[3:])

    results = run_on_threads(p, body)
    wholes = [join(parts, layout) for parts in zip(*(rows for rows, _ in results), strict=True)]
    numbers = [*case.learned, -1]
    for i, parts in enumerate(zip(*(parts for _, parts in results), strict=True)):
        wholes.append(join(parts, layout) if numbers[i] in dims else torch.stack(parts).sum(0))
    return wholes
