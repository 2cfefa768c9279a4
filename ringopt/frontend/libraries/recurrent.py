"""torch.nn's recurrent layers (RNN, GRU, LSTM), each direction of a layer an operator `ringopt_kernels::recurrent`.

    y, h, c = lstm(x, (h, c), weights, ...)   ->   state = cat([h, c], -1)                               # of each layer
                                                   y, state = recurrent(x, state, cat(weights), "lstm", hidden, biased)

Dynamo ends its graph at such a layer, so no backend sees what is around it. The operator calls torch's own function, so
numbers are its own. What it carries is in no affine way made of what it carried before: ranks share the batch, or each
runs its tokens when the one before it is done (ringopt/sharding/recurrences/kernel_scans.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.frontend.libraries.operators import LIBRARY, define, defined
from ringopt.rules.declare import Declaration, ScanRule
from ringopt.scans.kernel import FUNCTIONS
from ringopt.torch_compat.dynamo_recurrent import trace_recurrent_layers
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

NAME = "recurrent"
SCHEMA = "Tensor x, Tensor state, Tensor weights, str kind, int hidden, bool biased, str cast"
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
FUNCTION: dict[str, Any] = {kind: getattr(torch, kind) for kind in GATES}
CASTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # of autocast, which operators of a library do not know


def weights_in(weights: Tensor, inputs: int, state: int, kind: str, hidden: int, biased: bool) -> list[Tensor]:
    """Those of a layer, whose numbers one tensor holds: of the input, of the state, two biases, a projection."""
    rows, out = GATES[kind] * hidden, out_size(state, kind, hidden)
    shapes: list[tuple[int, ...]] = [(rows, inputs), (rows, out), *([(rows,)] * 2 if biased else [])]
    shapes += [(out, hidden)] if out != hidden else []
    parts = weights.split(list(map(prod, shapes)))
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def out_size(state: int, kind: str, hidden: int) -> int:
    """Of what a layer gives of a token; an LSTM carries its cell beside it."""
    return state - hidden if kind == "lstm" else state


def run(
    x: Tensor, state: Tensor, weights: Tensor, kind: str, hidden: int, biased: bool, cast: str
) -> tuple[Tensor, Tensor]:
    """One direction of one layer: x [B, n, D], state [B, out + hidden] of an LSTM, else [B, hidden]. Under autocast to
    `cast`, if any."""
    parts = weights_in(weights, x.shape[-1], state.shape[-1], kind, hidden, biased)
    cut = [out_size(state.shape[-1], kind, hidden), hidden] if kind == "lstm" else [hidden]
    first = [part.unsqueeze(0).contiguous() for part in state.split(cut, -1)]
    before = first if kind == "lstm" else first[0]
    with torch.autocast(x.device.type, getattr(torch, cast) if cast else None, enabled=bool(cast)):
        out, *last = FUNCTION[kind](x, before, parts, biased, 1, 0.0, True, False, True)
    return out.contiguous(), torch.cat([each[0] for each in last], -1).to(state.dtype)


def fake(
    x: Tensor, state: Tensor, weights: Tensor, kind: str, hidden: int, biased: bool, cast: str
) -> tuple[Tensor, Tensor]:
    """As `run`."""
    out = out_size(state.shape[-1], kind, hidden)
    dtype = dtype_of(kind, x.device.type, x.dtype, weights.dtype, cast, out != hidden) if cast else x.dtype
    return x.new_empty((*x.shape[:-1], out), dtype=dtype), state.new_empty(state.shape)


@lru_cache
def dtype_of(kind: str, device: str, x: torch.dtype, weights: torch.dtype, cast: str, projects: bool) -> torch.dtype:
    """Of results under autocast: one token of numbers is run, for it is not the same for all kinds and devices, and not
    what torch has of tensors without numbers."""
    with unset_fake_temporarily(), torch.no_grad():
        token, state = torch.zeros(1, 1, 8, dtype=x, device=device), (4 if projects else 8) + 8 * (kind == "lstm")
        shapes = [(GATES[kind] * 8, 8), (GATES[kind] * 8, 4 if projects else 8), *([(4, 8)] if projects else [])]
        flat = torch.zeros(sum(map(prod, shapes)), dtype=weights, device=device)
        return run(token, torch.zeros(1, state, dtype=x, device=device), flat, kind, 8, False, cast)[0].dtype


def says(**given: Any) -> Declaration:
    """Samples of a batch know nothing of each other."""
    return ScanRule(("x",), "state", heads={"x": 0, "state": 0, "0": 0, "1": 0})


def form(kind: str) -> Callable[..., Any]:
    """What Dynamo traces in the place of a function of torch."""
    op = defined(NAME)

    def traced(x: Tensor, before: Any, weights: Any, *settings: Any) -> Any:
        biased, layers, dropout, train, bidirectional, batch_first = settings
        states = [torch.cat([h, c], -1) for h, c in zip(*before, strict=True)] if kind == "lstm" else list(before)
        device = x.device.type
        cast = CASTS[torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else ""
        x, lasts = x if batch_first else x.transpose(0, 1), []
        own = list(by_direction(weights, layers * (1 + bidirectional)))
        for layer in range(layers):
            outs = []
            for way in range(1 + bidirectional):
                at = layer * (1 + bidirectional) + way
                hidden = own[at][0].shape[0] // GATES[kind]
                flat = torch.cat([weight.reshape(-1) for weight in own[at]])
                out, last = op(x.flip(1) if way else x, states[at], flat, kind, hidden, biased, cast)
                outs.append(out.flip(1) if way else out)
                lasts.append(last)
            x = torch.cat(outs, -1) if bidirectional else outs[0]
            if dropout and train and layer + 1 < layers:
                x = F.dropout(x, dropout, True)
        return x if batch_first else x.transpose(0, 1), *carried(torch.stack(lasts).to(x.dtype), kind, before)

    return traced


def by_direction(weights: Sequence[Tensor], count: int) -> Iterator[Sequence[Tensor]]:
    """Those of each direction of each layer."""
    each = len(weights) // count
    return (weights[at * each : (at + 1) * each] for at in range(count))


def carried(lasts: Tensor, kind: str, before: Any) -> Sequence[Tensor]:
    """What is carried out of all layers, as torch's function gives it."""
    return lasts.split([before[0].shape[-1], before[1].shape[-1]], -1) if kind == "lstm" else [lasts]


def teach_recurrent_layers(when: Callable[[Iterator[Any]], bool]) -> None:
    """For all that is traced from here on, where `when(backends)`."""
    define(NAME, SCHEMA, 2, run, fake, says)
    FUNCTIONS[f"{LIBRARY}::{NAME}.default"] = run
    trace_recurrent_layers({function: form(kind) for kind, function in FUNCTION.items()}, when)
