"""A step that is run in memory which is made once gives what it gives by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from ringopt.scans.in_place import RepeatedStep, StepRoles, kinds_in, out_variant, repeated_step
from tests.ops.test_scan import Called

aten = torch.ops.aten
STEPS = 5
Step = Callable[..., Sequence[Tensor]]


def written(s: Tensor, x: Tensor, w: Tensor) -> Sequence[Tensor]:
    """A step that writes into a value of its own, and takes an operand in another shape."""
    y = torch.zeros_like(x)
    y[0] = s[1] * w[0] + x.reshape(9)[2:5]
    y += x
    return s * 0.9 + y, y, y * 2


# (carry..., row..., const) -> (carry..., row..., sum), all [3, 3]: what a carry, a row and a sum may lie in.
STEPS_OF: dict[str, tuple[int, int, Step]] = {
    "a carry that is a row too, twice": (1, 1, lambda s, x, w: ((n := s @ w + x), n, n, n)),
    "carries that change places": (2, 1, lambda a, b, x, w: (b, a * 0.5 + x, a @ b, x)),
    "a carry as it was, and an operand": (2, 1, lambda a, b, x, w: (a, x, b @ w, w)),
    "results in another order": (1, 2, lambda s, x, z, w: (s.mT @ w, (x.mT @ z).mT, (z @ s).mT.reshape(3, 3), x)),
    "views of views": (1, 1, lambda s, x, w: ((s + x).mT.reshape(9)[:3].expand(3, 3) * 0.3, s.mT, w.mT @ x)),
    "what all steps share": (1, 1, lambda s, x, w: (s + (w @ w).exp() * 0.1, (w + 1).mT, w.mT)),
    "several results": (1, 1, lambda s, x, w: (torch.cat([s.split(1)[2], x.sort(0)[0][:2]]), s.max(0)[0] + x, s)),
    "products that are added": (1, 2, lambda s, x, z, w: (s * 0.9 + x @ z, x - z @ s, (z @ s).mT - x, x @ w + w)),
    "products added to what others read": (2, 1, lambda a, b, x, w: (a * 0.5 + x @ b, (n := b @ w) + x, n, n + x @ w)),
    "writes": (1, 1, written),
}  # fmt: skip


def drawn(*sizes: int) -> Tensor:
    return torch.rand(sizes, dtype=torch.float64)


def strided() -> Tensor:
    """A row a step, which is not contiguous."""
    return drawn(3, STEPS, 3).transpose(0, 1)


def prepared(name: str, keeps: bool) -> tuple[Step, list[Tensor], RepeatedStep]:
    torch.manual_seed(0)
    carries, rows, step = STEPS_OF[name]
    inputs = [*(drawn(3, 3) for _ in range(carries)), *(strided() for _ in range(rows)), drawn(3, 3)]
    of_inputs = (*["carry"] * carries, *["row"] * rows, "const")
    outputs = len(step(*inputs[:carries], *(x[0] for x in inputs[carries:-1]), inputs[-1]))
    roles = StepRoles(of_inputs, (*["carry"] * carries, *["row"] * (outputs - carries - 1), "sum"), keeps)
    return step, inputs, repeated_step(step, kinds_in(inputs, roles), roles)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", STEPS_OF)
def test_results_are_those_of_the_step(name, backwards, keeps):
    step, inputs, again = prepared(name, keeps)
    carries, order = again.roles.outputs.count("carry"), range(STEPS)[:: -1 if backwards else 1]
    given = [x.clone() for x in inputs]

    def one(state: Sequence[Tensor], t: int) -> Sequence[Tensor]:
        return step(*state[:carries], *(x[t] for x in inputs[carries:-1]), inputs[-1])

    wanted = list(accumulate(order, one, initial=inputs[:carries]))
    rows = [drawn(STEPS, 3, 3) for _ in again.roles.outputs[carries:-1]]
    kept = [drawn(STEPS + 1, 3, 3) for _ in range(carries)]
    for of_carry, x in zip(kept, inputs, strict=False):
        of_carry[-1 if backwards else 0] = x
    total = torch.ones(3, 3, dtype=torch.float64)
    last = again.run(inputs, [*kept, *rows, total], backwards)

    torch.testing.assert_close(last, list(wanted[-1][:carries]))
    for place, row in enumerate(rows, carries):
        stacked = torch.stack([found[place] for found in wanted[1:]])
        torch.testing.assert_close(row, stacked.flip(0) if backwards else stacked)
    torch.testing.assert_close(total, 1 + torch.stack([found[-1] for found in wanted[1:]]).sum(0))
    for place, of_carry in enumerate(kept if keeps else []):
        stacked = torch.stack([found[place] for found in wanted])
        torch.testing.assert_close(of_carry, stacked.flip(0) if backwards else stacked)
    torch.testing.assert_close(inputs, given, rtol=0, atol=0)  # nothing is written to


def test_nothing_is_made_viewed_or_copied_in_a_step():
    """But a view of what is carried: of operands and memory there is one each for all steps."""
    _step, inputs, again = prepared("results in another order", keeps=False)
    rows = [drawn(STEPS, 3, 3) for _ in range(2)]
    with Called() as calls:
        again.run(inputs, [inputs[0], *rows, torch.zeros(3, 3, dtype=torch.float64)])
    assert calls.times["mm"] == 3 * STEPS and calls.times["copy_"] <= STEPS
    assert calls.times["new_empty"] <= 2 and calls.times["transpose"] <= 2 * STEPS


def test_a_product_is_added_where_the_sum_goes():
    """The delta rule, of which each step has four calls of as many results: no sum of its own, no copy."""

    def step(s: Tensor, decay: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        new = v - torch.bmm(k, s)
        return [s * decay + torch.bmm(k.mT, new), new.reshape(2, 1, 3, 4)]

    inputs = [drawn(2, 5, 4), drawn(STEPS, 2, 1, 1), drawn(STEPS, 2, 3, 5), drawn(STEPS, 2, 3, 4)]
    roles = StepRoles(("carry", "row", "row", "row"), ("carry", "row"))
    again, news = repeated_step(step, kinds_in(inputs, roles), roles), drawn(STEPS, 2, 1, 3, 4)
    with Called() as calls:
        (last,) = again.run(inputs, [inputs[0], news])
    assert (calls.times["baddbmm"], calls.times["mul"]) == (2 * STEPS, STEPS)
    assert not calls.times["add"] + calls.times["sub"] + calls.times["bmm"] + calls.times["copy_"]
    state = inputs[0]
    for *given, new in zip(*inputs[1:], news, strict=True):
        state, expected = step(state, *given)
        torch.testing.assert_close(new, expected)
    torch.testing.assert_close(last, state)


def test_products_of_16_bits_are_rounded_before_they_are_added():
    inputs = [x.bfloat16() for x in (drawn(3, 3), drawn(STEPS, 3, 3))]
    roles = StepRoles(("carry", "row"), ("carry",))
    again = repeated_step(lambda s, x: [x + s @ x], kinds_in(inputs, roles), roles)
    state = inputs[0]
    for x in inputs[1]:
        state = x + state @ x
    assert torch.equal(*again.run(inputs, inputs[:1]), state)


def test_memory_is_used_again_once_nothing_reads_it():
    """Five values in a chain, of which two are there at a time: the one that is read and the one that is written. The
    last lies in the result."""

    def chain(s: Tensor, x: Tensor) -> Sequence[Tensor]:
        return [s, (s + x).sin().cos().exp().tanh()]

    inputs = [drawn(3, 3), drawn(STEPS, 3, 3)]
    roles = StepRoles(("carry", "row"), ("carry", "row"))
    again, rows = repeated_step(chain, kinds_in(inputs, roles), roles), drawn(STEPS, 3, 3)
    with Called() as calls:
        again.run(inputs, [inputs[0], rows])
    assert calls.times["new_empty"] == 2
    torch.testing.assert_close(rows, (inputs[0] + inputs[1]).sin().cos().exp().tanh())


def test_operators_that_write_to_memory_are_those_with_equal_arguments():
    assert out_variant(aten.bmm.default) is aten.bmm.out
    assert out_variant(aten.mul.Scalar) is aten.mul.Scalar_out
    assert out_variant(aten.sum.dim_IntList) is aten.sum.IntList_out
    assert out_variant(aten.transpose.int) is None and out_variant(aten.add_.Tensor) is None
    assert out_variant(aten.sort.default) is None
