"""The operators as torch sees them: schema, fake kernels, autograd, compiled code; and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.errors import OptionError, RingMismatchError
from ringopt.expr.mask import Mask
from ringopt.expr.terms import applied, axis, load, number
from ringopt.kernels.base import accumulator
from ringopt.ops.ring import VERSION
from tests.context_parallel.reference import assert_near, join, problem, sdpa, shard, visible
from tests.harness.threads import ThreadMesh, run_on_threads

forward = torch.ops.ringopt.ring_attention
backward = torch.ops.ringopt.ring_attention_backward

BIAS = Mask(bias=load(1, [axis("h")], torch.float32), visible=load(0, [axis("b"), axis("k")], torch.bool)).text


def config(
    n: int, m: int, pattern: str = "causal", mask: str = "", learned: tuple[int, ...] = (), **changes: Any
) -> tuple[Any, ...]:
    """Everything behind `seed`."""
    others = {
        "dropout_p": 0.0, "scale": 0.3, "q_layout": "contiguous", "kv_layout": "contiguous", "strategy": "ring",
        "kernel": "auto", "group": "pretend:0/1", "version": VERSION, **changes,
    }  # fmt: skip
    return (n, m, pattern, mask, list(learned), *others.values())


def arguments(dtype: torch.dtype = torch.float32, values: int = 8, bias: bool = False) -> tuple[Any, ...]:
    """Of one rank of one; `bias`: a padding vector [B, n], a learned number per head, sinks, and dropout."""
    q, k, v, _ = (x.to(dtype).requires_grad_() for x in vars(problem(7, 9, dims=(8, values))).values())
    sources = [torch.arange(18).view(2, 9) % 3 > 0, torch.arange(4.0).requires_grad_()] if bias else []
    if not bias:
        return q, k, v, [], None, None, *config(7, 9)
    extras = torch.ones(1, 4).requires_grad_(), torch.tensor(5)
    return q, k, v, sources, *extras, *config(7, 9, "full", BIAS, (1,), dropout_p=0.2)


CASES = pytest.mark.parametrize(
    ("dtype", "values", "bias"),
    [
        (torch.float32, 8, False),
        (torch.float64, 8, False),
        (torch.bfloat16, 8, False),
        (torch.float32, 5, False),
        (torch.float32, 8, True),
    ],
)


def detached(args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, sources, sinks, *rest = args
    given = (q.detach(), k.detach(), v.detach(), [x.detach() for x in sources])
    return *given, sinks if sinks is None else sinks.detach(), *rest


# ---- as torch sees them ----------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@CASES
def test_opcheck(dtype: torch.dtype, values: int, bias: bool) -> None:
    args = arguments(dtype, values, bias)
    torch.library.opcheck(forward.default, args)
    plain = detached(args)
    out, lse = forward(*plain)
    torch.library.opcheck(backward.default, (torch.ones_like(out), *plain[:3], out, lse, *plain[3:]))


@CASES
def test_outputs_are_dense_and_of_the_promised_dtypes(dtype: torch.dtype, values: int, bias: bool) -> None:
    args = detached(arguments(dtype, values, bias))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[:3]]
    out, lse = forward(*strided, *args[3:])
    grads = backward(out, *strided, out, lse, *args[3:])
    assert (out.dtype, lse.dtype) == (dtype, accumulator(dtype))
    assert [x.dtype for x in grads[:3]] == [dtype] * 3
    assert [x.shape for x in grads[3]] == [torch.Size([4]), torch.Size([1, 4])][: 2 * bias]
    assert all(x.is_contiguous() for x in (out, lse, *grads[:3], *grads[3]))


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_code_gives_the_same_numbers(bias: bool) -> None:
    def program(*args: Any) -> Tensor:
        return forward(*args)[0] * 2

    args = arguments(bias=bias)
    leaves = [*args[:3], *args[3][1:], *([args[4]] if bias else [])]
    expected = torch.autograd.grad(program(*args).sum(), leaves)
    found = torch.autograd.grad(torch.compile(program, fullgraph=True)(*args).sum(), leaves)
    for got, right in zip(found, expected, strict=True):
        assert_near(got, right, 1e-6)


def test_gradcheck() -> None:
    q, k, v, _, *rest = arguments(torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: forward(q, k, v, [], *rest)[0], (q, k, v), fast_mode=True)


def test_lse_has_no_gradient_and_no_double_backward() -> None:
    q, *rest = arguments()
    out, lse = forward(q, *rest)
    assert out.requires_grad and not lse.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="ring_attention_backward"):
        grad.sum().backward()


def test_autocast_outside_changes_nothing_inside() -> None:
    args = detached(arguments(values=5))  # the math kernel: autocast would lower its matrix products
    expected = forward(*args)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(forward(*args)[0], expected)


def test_autocast_outside_changes_nothing_in_the_backward_nor_in_its_halves() -> None:
    ops = torch.ops.ringopt

    def body(mesh: ThreadMesh) -> None:
        case = vars(problem(16, dims=(8, 5))).values()
        q, k, v, dout = (shard(x, "contiguous", 2, mesh.rank).float() for x in case)
        how = config(16, 16, group=mesh.name)
        given = (q, k, v, *forward(q, k, v, [], None, None, *how), [], None, None, *how)

        def halves() -> list[Tensor]:
            ticket = ops.ring_start(k, v, q.shape[1], True, 0, *how)
            dq, ticket, _ = ops.ring_backward_begin(dout, *given, "backward home", ticket)
            return [dq, *ops.ring_backward_finish(ticket, k, v, mesh.name)]

        expected = backward(dout, *given)[:3]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for found in (backward(dout, *given)[:3], halves()):
                assert all(map(torch.equal, found, expected))

    run_on_threads(2, body)


def test_gradients_only_where_they_are_asked_for() -> None:
    q, k, v, sources, *rest = arguments(bias=True)
    out, _ = forward(q, k.detach(), v, sources, *rest)
    out.sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None
    assert sources[1].grad is not None and sources[1].grad.shape == (4,)


# ---- over ranks ------------------------------------------------------------------------------------------------------
def spread(
    p: int, change: Any = None, mask: str = "", learned: tuple[int, ...] = (), sources: tuple[Tensor, ...] = ()
) -> Any:
    """out, dq, dk, dv and learned parts of each of p threads; `change(rank)` are odd arguments of that rank."""
    n, case = 17, problem(17)

    def body(mesh: ThreadMesh) -> list[Tensor]:
        q, k, v, dout = (shard(x, "zigzag", p, mesh.rank) for x in (case.q, case.k, case.v, case.dout))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        given = [x.clone().requires_grad_(i in learned) for i, x in enumerate(sources)]
        asked = {"scale": case.scale, "q_layout": "zigzag", "kv_layout": "zigzag", "group": mesh.name}
        asked |= change(mesh.rank) if change else {}
        pattern = asked.pop("pattern", "causal")
        out, _ = forward(*leaves, given, None, None, *config(n, n, pattern, mask, learned, **asked))
        out.backward(dout)
        return [out.detach(), *(x.grad for x in (*leaves, *given) if x.grad is not None)]

    return list(zip(*run_on_threads(p, body), strict=True))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_autograd_over_ranks(p: int) -> None:
    parts = spread(p)
    for shards, right in zip(parts, sdpa(problem(17), visible("causal", 17, 17)), strict=True):
        assert_near(join(shards, "zigzag"), right, 1e-12)


def test_a_learned_source_gets_a_part_on_every_rank() -> None:
    away = applied("abs", [applied("sub", [axis("k"), axis("q")], torch.int64)], torch.int64)
    nearest = applied("clamp", [away, 0, 3], torch.int64)
    slope = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    text = Mask(bias=load(0, [axis("h"), nearest], torch.float64)).text
    *_, learned = spread(3, None, text, (0,), (slope,))
    whole, case = slope.clone().requires_grad_(), problem(17)
    distance = (torch.arange(17) - torch.arange(17)[:, None]).abs().clamp(0, 3)
    scores = case.q @ case.k.repeat_interleave(2, 1).mT * case.scale + whole[:, distance]
    weights = scores.masked_fill(~visible("causal", 17, 17), -torch.inf).softmax(-1)
    (right,) = torch.autograd.grad(weights @ case.v.repeat_interleave(2, 1), whole, case.dout)
    assert_near(sum(learned), right, 1e-12)


@pytest.mark.parametrize(
    ("field", "odd", "told"),
    [
        ("pattern", "full", 'rank 2 has pattern="full", but ranks 0, 1 have pattern="causal"'),
        ("scale", 1.0, "rank 2 has scale=1.0, but ranks 0, 1 have scale="),
        ("strategy", "gather", 'rank 2 has strategy="gather", but ranks 0, 1 have strategy="ring"'),
        ("kernel", "math", 'rank 2 has kernel="math"'),
        ("version", "0.0.9", 'rank 2 has version="0.0.9"'),
        ("kv_layout", "contiguous", 'rank 2 has kv_layout="contiguous", but ranks 0, 1 have kv_layout="zigzag"'),
    ],
)
def test_ranks_that_differ(field: str, odd: Any, told: str) -> None:
    with pytest.raises(RingMismatchError) as raised:
        spread(3, lambda rank: {field: odd} if rank == 2 else {})
    assert str(raised.value).startswith("the ranks do not make the same ring_attention: ")
    assert told in str(raised.value)


# ---- refusals --------------------------------------------------------------------------------------------------------
def ones(heads: int = 2, rows: int = 6, dim: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(1, heads, rows, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("shards", "told"),
    [
        ((ones(rows=5), ones(), ones()), r"q is \[1, 2, 5, 8\], and rank 0 of 1 holds 6 rows \(dim 2\) of a"),
        ((ones(), ones(), ones(rows=7)), r"v is \[1, 2, 7, 8\], and rank 0 of 1 holds 6 rows"),
        ((ones(heads=3), ones(), ones()), r"q, k, v are \[1, 3, 6, 8\], .* which is no attention"),
        ((ones(dim=4), ones(), ones()), "which is no attention"),
        ((ones(dtype=torch.float64), ones(), ones()), "they must be of one dtype"),
    ],
)
def test_shards_that_do_not_fit(shards: tuple[Tensor, ...], told: str) -> None:
    with pytest.raises(RingMismatchError, match=f"ring_attention: .*{told}"):
        forward(*shards, [], None, None, *config(6, 6))


def test_a_kernel_that_cannot_is_refused() -> None:
    with pytest.raises(OptionError, match="option kernel='flash_cpu': kernel flash_cpu needs values as wide as keys"):
        forward(ones(), ones(), ones(dim=4), [], None, None, *config(6, 6, kernel="flash_cpu"))


def test_the_constant_mask() -> None:
    """A bias of one number changes nothing, and is still carried out."""
    text = Mask(bias=number(2.0, torch.float32)).text
    plain = forward(ones(), ones(), ones(), [], None, None, *config(6, 6))
    biased = forward(ones(), ones(), ones(), [], None, None, *config(6, 6, mask=text))
    assert_near(biased[0], plain[0], 1e-6)
    assert_near(biased[1], plain[1] + 2, 1e-6)


# ---- sizes of 1 ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["ring", "ring2", "gather", "gather_q", "ring_q", "ulysses", "merge", "local"])
def test_outputs_share_no_memory_where_sizes_are_1(strategy: str, dtype: torch.dtype) -> None:
    """A view of the one row of one head is contiguous: nothing that asks for that copies it. torch refuses such
    outputs."""

    def body(mesh: ThreadMesh) -> list[Tensor]:
        rows = {"merge": (1, 6), "local": (6, 1)}.get(strategy, (mesh.size, mesh.size))
        whole = {"merge": "q_layout", "local": "kv_layout"}.get(strategy)
        sides = zip(rows, ("q_layout", "kv_layout"), strict=True)
        queries, keys = (n if whole == side else n // mesh.size for n, side in sides)
        heads = mesh.size if strategy == "ulysses" else 1
        q, k, v = (torch.ones(1, heads, n, 1, dtype=dtype) for n in (queries, keys, keys))
        layouts = {whole: "replicated"} if whole else {}
        how = config(*rows, "full", group=mesh.name, strategy=strategy, **layouts)
        args = (q, k, v, [], None, None, *how)
        out, lse = forward(*args)
        return [out, *backward(out, *args[:3], out, lse, *args[3:])[:3]]

    for out, *_ in run_on_threads(2, body):
        assert torch.equal(out, torch.ones_like(out))
