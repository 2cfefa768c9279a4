"""Loss curves: 50 steps of an optimizer on 2 ranks are those of one process, however the step is made."""

from __future__ import annotations

import pytest
import torch

import ringopt
from tests.harness.models import VOCAB, build

STEPS, LENGTH = 50, 21
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def step_of(how, model, inputs, scaler):
    """Gradients of one step, and its loss."""
    if how == "accumulated":
        parts = [model(**inputs).loss, model(**{key: x.flip(0) for key, x in inputs.items()}).loss]
        loss = sum(parts) / len(parts)
    else:
        with torch.autocast("cpu", dtype=AUTOCAST.get(how), enabled=how in AUTOCAST):
            loss = model(**inputs).loss
    scaler.scale(loss).backward()
    return loss.detach()


def curve(how, backend):
    """The losses of 50 steps; `backend` None: eager."""
    torch._dynamo.reset()
    model, inputs = build("llama", LENGTH)
    if how == "checkpointed":
        model.model.gradient_checkpointing_enable()
    if backend:  # in place, as the Trainer of transformers needs it
        model.compile(backend=backend, options={"inner_backend": "aot_eager"})
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=how in ("plain", "float16"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how == "float16")
    draw, losses = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        first = torch.randint(0, VOCAB, (len(inputs["input_ids"]), 1), generator=draw)
        ids = (first + torch.arange(LENGTH)) % VOCAB  # what can be learnt
        losses.append(float(step_of(how, model, {"input_ids": ids, "labels": ids}, scaler)))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def on_rank(how):
    return curve(how, "ring"), [report.sharded_fraction for report in ringopt.reports()[-1:]]


@pytest.mark.zoo
@pytest.mark.parametrize(
    "how, bound",
    [
        pytest.param("plain", 1e-4, marks=pytest.mark.zoo),
        pytest.param("checkpointed", 1e-4, marks=pytest.mark.zoo),
        pytest.param("accumulated", 1e-4, marks=pytest.mark.zoo),
        pytest.param("bfloat16", 2e-2, marks=pytest.mark.zoo),
        ("float16", 5e-3),
    ],
)
def test_fifty_steps(ranks, how, bound):
    (found, sharded), (other, _) = ranks(2, on_rank, how, timeout=240)
    expected = curve(how, None)
    assert found == other, "the ranks drift apart"
    assert sharded == [1.0] and expected[-1] < expected[0]
    assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) < bound
