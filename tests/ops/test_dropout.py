"""Which weights are dropped: like chance, by their place, and by compiled code too."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.ops.ring import VERSION
from tests.context_parallel.reference import assert_near, problem
from tests.ops.scored import CASES, DOUBLE, SEED, N, dense


def test_the_mask_of_dropout_looks_like_chance() -> None:
    p, rows, keys = 0.3, 300, 400
    kept = Dropout(p, SEED).kept(2, 3, range(rows), range(keys)).to(DOUBLE)
    other = Dropout(p, SEED + 1).kept(2, 3, range(rows), range(keys)).to(DOUBLE)
    x, y = ((z - (1 - p)) / (p * (1 - p)) ** 0.5 for z in (kept, other))  # of mean 0 and variance 1
    assert abs(float(x.mean())) < 4 / x.numel() ** 0.5
    assert abs(float((x * y).mean())) < 4 / x.numel() ** 0.5  # another seed, another mask
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3)):
        mean = x.mean(dims)
        assert float(mean.abs().max()) < 4.5 / (x.numel() / mean.numel()) ** 0.5
    one = x[1, 2]
    for line in (one, one.T):  # no two rows, and no two keys, alike
        size, length = line.shape
        assert float((line @ line.T / length - torch.eye(size) * (line**2).mean(1)).abs().max()) < 6 / length**0.5
    assert abs(float((x[0, 0] * x[0, 1]).mean())) < 4 / one.numel() ** 0.5  # nor two heads
    assert abs(float((x[0, 0] * x[1, 0]).mean())) < 4 / one.numel() ** 0.5  # nor two batch rows
    assert float(torch.fft.fft2(one).abs().max()) < 5 * one.numel() ** 0.5  # no period in either direction


def test_the_hash_is_that_of_64_bit_arithmetic() -> None:
    """SplitMix64 in Python's unbounded integers: shifts are logical, products wrap."""
    most = 2**64 - 1

    def scrambled(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & most
        return (x ^ x >> 27) * 0x94D049BB133111EB & most

    def mixed(x: int) -> int:
        x = scrambled(x & most)
        return x ^ x >> 31

    p = 0.37
    kept = Dropout(p, SEED).kept(2, 2, range(3, 6), range(5, 12))
    for b, h, q, k in product(range(2), range(2), range(3), range(7)):
        row = mixed(int(SEED) + 0x9E3779B97F4A7C15)
        for place in (b, h, q + 3):
            row = mixed(row ^ place)
        key = mixed(mixed(int(SEED) + 0x5851F42D4C957F2D) ^ (k + 5))
        signed = (scrambled(row ^ key) ^ 2**63) - 2**63
        assert bool(kept[b, h, q, k]) == (signed >= int(p * 2**64) - 2**63)


def test_a_weight_is_dropped_by_its_place() -> None:
    drop = Dropout(0.5, SEED)
    whole = drop.kept(2, 3, range(20), range(30))
    assert torch.equal(drop.kept(2, 3, range(7, 11), range(13, 29)), whole[:, :, 7:11, 13:29])
    assert torch.equal(drop.kept(1, 2, range(20), range(30)), whole[:1, :2])
    assert Dropout(1e-9, SEED).kept(2, 3, range(20), range(30)).all()
    assert not Dropout(1.0, SEED).kept(2, 3, range(20), range(30)).any()


def test_compiled_code_drops_the_same() -> None:
    """At a size where C++ may reason about its loops: overflow there once wrote past the end."""

    def program(seed: Tensor) -> Tensor:
        return Dropout(0.5, seed).kept(2, 3, range(7, 77), range(11, 144))

    assert torch.equal(torch.compile(program, fullgraph=True)(SEED), program(SEED))


@torch.compiler.config.patch(cache_key_tag=VERSION)  # the operator is cached by its name, whatever it computes
@pytest.mark.zoo
@pytest.mark.parametrize("name", ["dropout, sinks, softcap", "dropout, causal", "softcap"])
def test_compiled_code_gives_the_same_numbers(name: str) -> None:
    case, given = CASES[name], problem(N)
    how = (case.pattern, case.mask.text, case.dropout_p, given.scale)

    def program(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seed: Tensor) -> Tensor:
        extras = (sinks if case.sinks is not None else None, seed if case.dropout_p else None)
        out: Tensor = torch.ops.ringopt.attention(q, k, v, None, [], *extras, *how)
        return out

    leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    args = (*leaves, case.sinks if case.sinks is not None else SEED, SEED)
    out = torch.compile(program, fullgraph=True)(*args)
    grads = torch.autograd.grad(out, leaves, given.dout)
    for got, right in zip((out, *grads), dense(case, given), strict=False):
        assert_near(got.detach(), right, 1e-12)
