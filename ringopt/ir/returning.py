"""The form of an operator that writes in which it returns instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten


def returning(node: fx.Node) -> Any:
    """The op that returns what a write writes, `add` of `add_`, `add.Tensor` of `add.out`, `pow.Tensor_Scalar` of
    `pow_.Scalar`; None where there is none. What is written to has other names in some (`dropout` of `dropout_`)."""
    target = node.target
    name = target._schema.name.split("::")[1].removesuffix("_")
    packet = getattr(aten, "normal_functional" if target is aten.normal_.default else name, None)
    if packet is None:
        return None

    def taken(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
        arguments = [arg for arg in overload._schema.arguments if arg.name != "out"]
        return [("" if arg.name in ("self", "input") else arg.name, str(arg.type)) for arg in arguments]

    for overload in map(partial(getattr, packet), packet.overloads()):
        if taken(overload) == taken(target) and not overload._schema.is_mutable:
            return overload
    return None
