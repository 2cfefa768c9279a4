"""Steps in complex numbers, and the same on pairs of real numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringopt.ir.nodes import op_name, value_of
from ringopt.scans.body import NoBody, from_text, to_text
from ringopt.scans.real_parts import RULES, in_real_numbers, real_step
from ringopt.scans.trace import OperandKind, sized
from ringopt.torch_compat.fx import make_fx
from tests.scans.bodies import drawn

aten = torch.ops.aten
Step = Callable[[Tensor, Tensor, Tensor], list[Tensor]]

# (state [2, 3, 3] complex, x [2, 3, 3] complex, r [3, 3] real) -> results
STEPS: dict[str, Step] = {
    "recurrent unit": lambda s, x, r: [s * torch.exp(x) + r, (s @ x).real],
    "products": lambda s, x, r: [torch.einsum("bij,bjk->bik", s, x), torch.mm(s[0], x[1]), torch.bmm(s, x), s * 2j],
    "a real factor": lambda s, x, r: [s * r, r * s, s / 3, s / r, torch.einsum("bij,jk->bik", s, r.to(s.dtype))],
    "sums": lambda s, x, r: [s + r, s - x, torch.rsub(s, x, alpha=2), torch.sub(s, x, alpha=2), s + 1, 1 - s,
                             torch.add(r, s)],
    "imaginary numbers": lambda s, x, r: [s + 1j, r * 1j, torch.add(s, x, alpha=1j), 1j - s, r + 1j,
                                        torch.rsub(r, 2j)],
    "conjugates": lambda s, x, r: [s.conj() * x, torch.conj_physical(s), s.conj().resolve_conj(), s.imag, -s],
    "views": lambda s, x, r: [s.mT, s[:, 0], s.flatten(1), s.reshape(6, 3), s[:, 1:], s.unsqueeze(0).expand(2, 2, 3, 3),
                              s.permute(2, 0, 1), s.transpose(0, 1), s[..., :1].squeeze(-1), s.narrow(1, 0, 2),
                              s.movedim(0, 1), s[0].t(), s.view(2, 9), s.unflatten(-1, (3, 1)), aten.alias(s),
                              s.clone()],
    "reductions": lambda s, x, r: [s.sum(-1), s.mean((0, 1))],
    "casts": lambda s, x, r: [s.to(torch.complex64), r.to(s.dtype), aten._to_copy(r, dtype=s.dtype), r.type_as(s)],
    "parts": lambda s, x, r: [torch.complex(r, r + 1), torch.view_as_real(s), s.real, s.imag,
                              torch.view_as_complex(torch.stack([r, r * 2], -1))],
    "choices": lambda s, x, r: [torch.where(r > 0, s, x), torch.where(r > 0, s, 0), torch.where(r > 0, 1j, s),
                                torch.where(r > 0, r.to(s.dtype), x)],
}  # fmt: skip


def operands() -> list[Tensor]:
    s, x, r = drawn(2, 3, 3), drawn(2, 3, 3, seed=1), drawn(3, 3, seed=2)
    return [torch.complex(s, x).detach(), torch.complex(x * 0.5, s).detach(), r.detach()]


def pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def graph_of(step: Step) -> torch.fx.GraphModule:
    """As it is captured, before autograd: with fake values."""
    return make_fx(step, tracing_mode="fake", pre_dispatch=True)(*operands())


@pytest.mark.parametrize("name", STEPS)
def test_the_step_on_pairs_gives_the_pairs(name: str) -> None:
    wanted = [pairs(x) for x in STEPS[name](*operands())]
    found = real_step(graph_of(STEPS[name]))(*map(pairs, operands()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12 if other.dtype == torch.float64 else 1e-5, atol=1e-12)
        assert one.dtype == other.dtype


def test_each_rule_stands_in_a_step() -> None:
    seen = {op_name(node) for step in STEPS.values() for node in graph_of(step).graph.nodes}
    assert {name for name in RULES if name not in seen} == NOT_CAPTURED


# Which do nothing, or are captured by the name of what they call here.
NOT_CAPTURED = {"_unsafe_view", "contiguous", "lift_fresh", "lift_fresh_copy", "conj"}


def test_what_is_not_known_is_refused() -> None:
    for step, why in (
        (lambda s, x, r: [s.abs()], "abs of complex numbers"),
        (lambda s, x, r: [s / x], "a division by complex numbers"),
        (lambda s, x, r: [s.sum(-1, dtype=torch.complex64)], "with a dtype"),
        (lambda s, x, r: [torch.einsum("bij->bi", s)], "einsum of 1 operands"),
    ):
        with pytest.raises(NoBody, match=why):
            real_step(graph_of(step))


def test_a_text_and_its_kinds() -> None:
    kinds = tuple(map(OperandKind.of, operands()))
    text = to_text(graph_of(lambda s, x, r: [s * r + x, s.real]), 1, 1, 1)
    real, found = in_real_numbers(text, kinds)
    assert [kind.shape for kind in found] == [(2, 3, 3, 2), (2, 3, 3, 2), (3, 3)]
    assert {kind.dtype for kind in found} == {torch.float64}
    assert from_text(real).ys == 1 and sized(real, found)
    assert in_real_numbers(real, found) == (real, found)  # nothing is to be done


def test_no_operator_runs_on_fakes_that_threads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once in one fake mode are an error, seldom."""
    kinds = tuple(map(OperandKind.of, operands()))
    text = to_text(graph_of(lambda s, x, r: [s * r + x, (s + x.to(torch.complex64)).real]), 1, 1, 1)
    mode = value_of(sized(text, kinds).inputs[0]).fake_mode
    monkeypatch.setattr(mode, "dispatch", lambda *given: pytest.fail(f"{given[0]} runs"))
    assert sized(*in_real_numbers(text, kinds))
