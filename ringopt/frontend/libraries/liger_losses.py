"""Liger's losses over a vocabulary: a loss for each token as an operator, and sums over tokens in torch.

    loss, ... = LigerCrossEntropyFunction.apply(logits, target, ..., reduction="mean")

    each = ringopt_kernels::liger_cross_entropy(logits, target, ...)          loss = each.sum() / (target != -100).sum()

With the last linear layer in it, logits are made for some tokens at a time, forward and backward, as Liger makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.frontend.libraries.liger import FUNCTIONS, apply_by_name, beyond, parameters
from ringopt.frontend.libraries.operators import define, defined
from ringopt.rules.declare import Declaration, Tokenwise
from ringopt.scans.segment_map import wide
from ringopt.torch_compat.autograd import recording
from ringopt.torch_compat.dynamo_calls import not_traced

PLAIN, LINEAR = "liger_cross_entropy", "liger_fused_linear_cross_entropy"
HOW = "int ignore_index, float lse_square_scale, float label_smoothing, float? softcap"
SCHEMAS = {
    PLAIN: f"Tensor _input, Tensor target, Tensor? weight, {HOW}",
    LINEAR: f"Tensor _input, Tensor weight, Tensor target, Tensor? bias, Tensor? ce_weight, {HOW}",
}
NAMES = {op: tuple(argument.split()[1] for argument in schema.split(", ")) for op, schema in SCHEMAS.items()}
# Arguments that change rounding, or memory, and no number.
IDLE = ("reduction", "accum_dtype", "chunk_mem_const")
ASKED = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens")


def cross_entropy_form(function: Any) -> Callable[..., Any]:
    """Of LigerCrossEntropyFunction."""
    return loss_form(PLAIN, function, "weight")


def linear_cross_entropy_form(function: Any) -> Callable[..., Any]:
    """Of LigerFusedLinearCrossEntropyFunction."""
    return loss_form(LINEAR, function, "ce_weight")


def loss_form(name: str, function: Any, weights: str) -> Callable[..., Any]:
    """What Dynamo traces in the place of `function.apply`; `weights` is the argument with those of classes. Results
    that are asked for beside the loss are left to Liger."""
    op, names, usual = operator_for(name, function), NAMES[name], parameters(function)
    untraced, known = not_traced(function.apply), (*NAMES[name], *IDLE)
    others = (None,) * sum(asked in usual for asked in ASKED)

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = {**usual, **dict(zip(usual, args)), **kwargs}  # noqa: B905  (fewer arguments than parameters)
        rows, target, of_classes = given["_input"], given["target"], given[weights]
        mixed = of_classes is not None and given["lse_square_scale"] != 0 and given["reduction"] == "mean"
        if beyond(given, known, usual) or mixed or rows.dim() != 2 or rows.shape[0] != target.shape[0]:
            return untraced(*args, **kwargs)
        if name == LINEAR and torch.is_autocast_enabled(rows.device.type):
            to = torch.get_autocast_dtype(rows.device.type)
            for part in ("_input", "weight", "bias"):
                given[part] = None if given[part] is None else given[part].to(to)
        each = op(*[given[name] for name in names])
        return (reduced(each, target, given["reduction"], given["ignore_index"], of_classes), *others)

    return traced


def reduced(each: Tensor, target: Tensor, reduction: str, ignored: int, of_classes: Tensor | None) -> Tensor:
    """Over tokens, of which those that are ignored have a loss of 0."""
    if reduction == "none":
        return each
    total = each.sum(dtype=wide(each.dtype))
    if reduction == "mean":
        seen = target != ignored
        count = seen.sum()
        if of_classes is not None:
            parts = torch.where(seen, of_classes[torch.where(seen, target, 0)], 0)
            total = total / torch.where(count == 0, 1, parts.sum(dtype=total.dtype))
        else:
            total = total / count.clamp(min=1)
    return total.to(each.dtype)


def token_by_token(**given: Any) -> Declaration:
    """The rule of both."""
    return Tokenwise({"_input": 0, "target": 0}, 0)


def operator_for(name: str, function: Any) -> Any:
    """The operator that calls `function`; it is defined once."""
    if name not in FUNCTIONS and name == PLAIN:
        define(name, SCHEMAS[name], 1, run_plain, lambda x, *_others: x.new_empty(x.shape[:1]), token_by_token)
    elif name not in FUNCTIONS:
        fake = lambda x, *_others: x.new_empty(x.shape[:1], dtype=torch.float32)  # noqa: E731
        define(name, SCHEMAS[name], 1, run_linear, fake, token_by_token, linear_gradients)
    FUNCTIONS[name] = function
    return defined(name)


def run_plain(*args: Any) -> Tensor:
    """The kernel writes the gradient over the logits."""
    given = dict(zip(NAMES[PLAIN], args, strict=True))
    return each_loss({**given, "_input": given["_input"].clone(memory_format=torch.contiguous_format)})


def each_loss(given: dict[str, Any]) -> Tensor:
    """Of each token, by Liger's kernel."""
    found: Tensor = apply_by_name(FUNCTIONS[PLAIN], {**given, "reduction": "none"})[0]
    return found


# ---- with the last linear layer --------------------------------------------------------------------------------------
def run_linear(*args: Any) -> Tensor:
    """Of each token, some tokens at a time."""
    given = dict(zip(NAMES[LINEAR], args, strict=True))
    return torch.cat([each_loss(logits_of(given, some)).float() for some in chunks(given)])


def linear_gradients(grads: list[Tensor], wanted: list[int], *args: Any) -> list[Tensor]:
    """Of rows, weights and bias: logits are made again."""
    given = dict(zip(NAMES[LINEAR], args, strict=True))
    rows, weight = given["_input"], given["weight"]
    asked = [NAMES[LINEAR][at] for at in wanted]
    found = {name: torch.zeros_like(given[name], dtype=wide(weight.dtype)) for name in asked}
    for some in chunks(given):
        call = logits_of(given, some)
        with recording():
            logits = call["_input"].requires_grad_()
            (slope,) = torch.autograd.grad(each_loss(call), logits, grads[0][some].to(logits.dtype))
        slope = slope.to(rows.dtype)
        if "_input" in found:
            found["_input"][some] = (slope @ weight).to(found["_input"].dtype)
        if "weight" in found:
            found["weight"] += slope.mT @ rows[some]
        if "bias" in found:
            found["bias"] += slope.sum(0)
    return [found[name].to(given[name].dtype) for name in asked]


def chunks(given: dict[str, Any]) -> Iterator[slice]:
    """Of tokens, whose logits take about the memory of all rows."""
    (tokens, width), classes = given["_input"].shape, given["weight"].shape[0]
    some = max(1, -(-tokens * width // classes))
    return (slice(first, min(first + some, tokens)) for first in range(0, tokens, some))


def logits_of(given: dict[str, Any], some: slice) -> dict[str, Any]:
    """The call of the loss for some tokens."""
    logits = F.linear(given["_input"][some], given["weight"], given["bias"])
    of_tokens = {"_input": logits.to(wide(logits.dtype)), "target": given["target"][some], "weight": given["ce_weight"]}
    return {**given, **of_tokens}
