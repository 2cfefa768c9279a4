"""What the prediction looks at, read off an attention site of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.calls import AttentionCall
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.cost.choose import Case
from ringopt.cost.message_bytes import bytes_between, bytes_sent
from ringopt.cost.simulate import Heads
from ringopt.distributed.agreed_rates import agreed_rates
from ringopt.distributed.mesh import ANY, Mesh, PretendedMesh
from ringopt.hardware.devices import device_of
from ringopt.hardware.rates import Rates, cautious, rates_of
from ringopt.ir.nodes import named, value_of
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.kernels.choose import choose_kernel, kernel_on
from ringopt.options import KernelName
from ringopt.report import bytes_text

LEAST = 2  # ranks


def lengths(node: fx.Node, mesh: Mesh) -> tuple[int, int]:
    """Of queries and keys. A program for any number of ranks holds them against that number when it runs."""
    q, k = AttentionCall.of(node).rows
    return (at_hand(q), at_hand(k)) if mesh.name == ANY else (q, k)


@dataclass(frozen=True)
class SiteKernel:
    """The kernel that a graph is made with, that which the hardware would run that a report is made for, and why that
    one."""

    here: str
    there: str
    reason: str


def kernel_of(values: tuple[Tensor, Tensor, Tensor], asked: KernelName, mesh: Mesh) -> SiteKernel:
    """Of an attention of q, k, v. Raises OptionError where the kernel that is asked for cannot do it."""
    q, k, v = values
    gpu = device_of(mesh.hardware) if isinstance(mesh, PretendedMesh) and mesh.hardware is not None else None
    if gpu is None or gpu.capability is None:
        kernel, reason = choose_kernel(asked, q.dtype, q.device, k.shape[-1], v.shape[-1])
        return SiteKernel(kernel.name, kernel.name, reason)
    there, reason = kernel_on(gpu, asked, q.dtype, k.shape[-1], v.shape[-1])
    here, _ = choose_kernel("math" if asked == "math" else "auto", q.dtype, q.device, k.shape[-1], v.shape[-1])
    return SiteKernel(here.name, there.name, reason)


def case_of(node: fx.Node, mesh: Mesh, kernel: KernelName, carries: Mapping[fx.Node, bool]) -> Case:
    """What the prediction looks at: where lengths are open, those at hand. Scores that a function changes, and dropped
    weights, are computed in products."""
    call = AttentionCall.of(node)
    q, k, v = call.values
    by = "math" if call.dropout_p > 0 or call.mask_term.score is not None else kernel_of((q, k, v), kernel, mesh).here
    training = torch.is_grad_enabled() and carries[node]
    q_length, kv_length = map(at_hand, lengths(node, mesh))
    return Case(call.pattern, q_length, kv_length, Heads.of(q, k, v, by), training, call.mask)


def looked_at(mesh: Mesh) -> int:
    """The number of ranks that is predicted for: of a program for any number, the least that there can be."""
    return LEAST if mesh.name == ANY else mesh.size


def rates_for(mesh: Mesh, *sites: fx.Node) -> Rates:
    """Those that the ranks agreed on; a program for any machine is made for none in particular."""
    return rates_at(mesh, value_of(named(sites[0], "q")))


def rates_at(mesh: Mesh, like: torch.Tensor) -> Rates:
    """For what is computed where `like` lies, in its dtype."""
    if mesh.name == ANY:
        return cautious()
    if isinstance(mesh, PretendedMesh) and mesh.hardware is not None:
        return rates_of(mesh.hardware, str(like.dtype).removeprefix("torch."))
    return agreed_rates(mesh, like.device.type)


def over_nodes(plan: HeadExchange, heads: Heads, rank: int) -> str:
    """What goes within a node and what leaves it, in the forward."""
    sent, away = bytes_sent(plan, heads, rank), bytes_between(plan, heads, rank, plan.node)
    note = f"nodes of {plan.node} ranks: of {bytes_text(sent)} sent, {bytes_text(away)} leave the node"
    if plan.kv_heads >= plan.node:
        return note
    return f"{note}; {plan.kv_heads} KV heads for the {plan.node} ranks of a node: each goes to all that read it"
