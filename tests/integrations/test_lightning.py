"""Lightning's Trainer and Fabric with `cp_size` ranks a sequence log what one process logs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="an extra: pip install 'ringopt[lightning]'")

import lightning
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.compile import from_compiled

from ringopt.errors import OptionError
from ringopt.integrations.lightning import FabricRingStrategy, RingStrategy
from tests.integrations.lightning_trainings import fabricated, fitted
from tests.integrations.trainings import EAGER, LONG, Training, check_alike, check_ranks

CASES = {
    "accumulated": (Training(arguments={"accumulate_grad_batches": 2}, options=EAGER), 2),
    "window": (Training("gemma3", steps=2, options=EAGER), 2),
    "inductor": (Training(steps=2, options={}), 2),
    "DDP beside it": (Training(data="equal", options=EAGER), 4),
}


@pytest.mark.zoo
def test_fit_validate_and_predict(ranks: Callable[..., list[Any]]) -> None:
    found, expected = check_ranks(ranks, fitted, Training(steps=2, options=EAGER))
    assert found["left"]  # the module is as it came
    torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=1e-4, atol=1e-4)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.zoo
@pytest.mark.parametrize("name", CASES)
def test_trainings_of_other_kinds(ranks: Callable[..., list[Any]], name: str) -> None:
    case, p = CASES[name]
    check_ranks(ranks, fitted, case, p, cp_size=2)


@pytest.mark.zoo
def test_mixed_precision(ranks: Callable[..., list[Any]]) -> None:
    case = Training(arguments={"precision": "bf16-mixed"}, steps=2, options=EAGER)
    [expected] = ranks(1, fitted, case, None, timeout=LONG)
    for found in ranks(2, fitted, case, {"cp_size": 2}, timeout=LONG):
        check_alike(found, expected, tolerance=1e-2)


@pytest.mark.zoo
@pytest.mark.parametrize("p", [2, 4])
def test_fabric(ranks: Callable[..., list[Any]], p: int) -> None:
    check_ranks(ranks, fabricated, Training(data="equal", options=EAGER), p, cp_size=2)


def test_a_module_is_left_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the strategy has compiled is so until its end; what the user has compiled stays so."""
    for name in ("setup", "teardown"):
        monkeypatch.setattr(DDPStrategy, name, lambda *_: None)
    monkeypatch.setattr(RingStrategy, "compiling", lambda *_, **__: {"backend": "eager"})
    module, strategy = lightning.LightningModule(), RingStrategy(1)
    strategy.connect(module)
    found = []
    for by_the_user in (False, False, True):
        if by_the_user:
            from_compiled(torch.compile(module, backend="eager"))
        strategy.setup(SimpleNamespace(state=TrainerState(fn=TrainerFn.FITTING)))
        within = module._compiler_ctx is not None, "log" in vars(module)
        strategy.teardown()
        found.append((*within, module._compiler_ctx is not None, "log" in vars(module)))
    assert found == [(True, True, False, False)] * 2 + [(True, False, True, False)]


@pytest.mark.parametrize("strategy", [RingStrategy, FabricRingStrategy])
def test_what_cannot_be_is_an_error(strategy: Any) -> None:
    with pytest.raises(ValueError, match="cp_size must be at least 1, but got 0"):
        strategy(0)
    with pytest.raises(OptionError, match="Lightning makes the mesh"):
        strategy(2, options={"mesh": None})
    made = strategy(2, parallel_devices=[torch.device("cpu")] * 3)
    with pytest.raises(ValueError, match="cp_size=2 on 3 ranks"):
        _ = made.distributed_sampler_kwargs
