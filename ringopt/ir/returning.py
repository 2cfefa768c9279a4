"""The functional variant of an in-place operator."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from ringopt.torch_compat.schema import OpOverload, schema_of

aten = torch.ops.aten


def returning(node: fx.Node) -> Any:
    """The functional variant of a mutating op: `add` of `add_`, `__or__` of `__ior__`, `add.Tensor` of `add.out`,
    `pow.Tensor_Scalar` of `pow_.Scalar`; None where there is none. Some name the mutated argument otherwise (`dropout`
    of `dropout_`)."""
    target = node.target
    name = schema_of(target).name.split("::")[1]
    name = re.sub("^__i(?=[a-z]+__$)", "__", name) if name.endswith("__") else name.removesuffix("_")
    packet = getattr(aten, "normal_functional" if target is aten.normal_.default else name, None)
    if packet is None:
        return None

    def taken(overload: OpOverload) -> list[tuple[str, str]]:
        arguments = [arg for arg in schema_of(overload).arguments if arg.name != "out"]
        return [("" if arg.name in ("self", "input") else arg.name, str(arg.type)) for arg in arguments]

    for overload in map(partial(getattr, packet), packet.overloads()):
        if taken(overload) == taken(target) and not schema_of(overload).is_mutable:
            return overload
    return None
