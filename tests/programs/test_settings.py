"""Settings of torch that a program may have on: none changes a number, and none ends a step that eager takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import ringopt
from ringopt.errors import RefusedError
from ringopt.torch_compat import inductor
from ringopt.torch_compat.dynamo import patched
from tests.harness.models import difference, run
from tests.programs.test_graph_breaks import Broken, data


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "deterministic": deterministic,
    "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "eager": lambda: torch.compiler.set_stance("force_eager"),
    "static shapes": lambda: patched(automatic_dynamic_shapes=False),
    "no errors": lambda: patched(suppress_errors=True),
    "compiled autograd": lambda: patched(compiled_autograd=True),
    "cpp wrapper": lambda: inductor.patched(cpp_wrapper=True),
}


class Whole(Broken):
    """Without breaks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.attend(layer, x)
        return x.square().mean()


def on_rank(name: str) -> tuple[float, int]:
    torch._dynamo.reset()
    model: nn.Module = Whole()
    inner, before = "inductor" if name == "cpp wrapper" else "aot_eager", len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": inner})
    with SETTINGS[name]():
        found = run(compiled, model, {"x": data()})
    return difference(found, run(model, model, {"x": data()})), len(ringopt.reports()) - before


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_that_of_one_process(ranks: Any, name: str) -> None:
    for error, graphs in ranks(2, on_rank, name):
        assert error < 1e-5 and graphs == (name != "eager")


def of_a_dual() -> str:
    torch._dynamo.reset()
    model = Whole()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    with torch.no_grad(), forward_ad.dual_level():
        try:
            compiled(forward_ad.make_dual(data().detach(), torch.ones_like(data())))
        except RefusedError as error:
            return str(error)
    return ""


def test_a_forward_mode_gradient_is_refused_and_not_lost(ranks: Any) -> None:
    for said in ranks(2, of_a_dual):
        assert said.startswith("input x has a forward-mode gradient")


def excepted(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A product that autocast around the program leaves alone, and an attention of which K and V share memory."""
    with torch.autocast("cpu", enabled=False):
        scores = q @ k.mT
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    k, v = k[:, : q.shape[1]], k[:, : q.shape[1]]
    return scores, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def under_autocast(inner: str) -> tuple[float, float, list[torch.dtype], float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = torch.randn(2, 20, 16, requires_grad=True), torch.randn(2, 24, 16, requires_grad=True)
    compiled = torch.compile(excepted, backend="ring", options={"inner_backend": inner})
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(*given), excepted(*given)
    gradients = [torch.autograd.grad(sum(y.float().square().sum() for y in ys), given) for ys in (found, expected)]
    errors = float((found[0] - expected[0]).abs().max()), difference(*gradients)
    return *errors, [y.dtype for y in found], ringopt.reports()[-1].sharded_fraction


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_autocast_casts_nothing_that_a_program_excepts_from_it(ranks: Any, inner: str, p: int) -> None:
    for error, of_gradients, dtypes, share in ranks(p, under_autocast, inner):
        assert error < 1e-5 and of_gradients < 1e-2 and dtypes == [torch.float32, torch.bfloat16]
        assert share > 0 or p == 1
