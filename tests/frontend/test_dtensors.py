"""DTensors in a program (tensor parallelism): each is its local tensor, and the sequence is shared beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import ringopt
from ringopt.dims.rules import rule_of
from ringopt.distributed.mesh import PretendedMesh
from ringopt.frontend.dtensors.local_graph import DTensorBoundary, with_local_tensors
from ringopt.frontend.dtensors.other_meshes import why_not_across
from ringopt.ir.refusal import GraphRefused
from ringopt.torch_compat.distributed import AsyncCollectiveTensor
from tests.harness.errors import worst_of

WORDS, WIDTH, HEAD = 12, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (made(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for made in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(WORDS, WIDTH), Block(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(self.words(ids)))
        return found


def plan(between: Any) -> dict[str, Any]:
    """`between` layers a value is whole on all ranks that share weights, or they share its tokens too."""
    columns, norm = {"input_layouts": between}, {"block.norm": SequenceParallel(use_local_output=True)}
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        **{f"block.{name}": ColwiseParallel(**columns) for name in "qkv"},
        "block.out": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(**columns, output_layouts=Replicate()),
        **(norm if between == Shard(1) else {}),
    }


def made(mesh: DeviceMesh | None = None, between: Any = None) -> nn.Module:
    torch.manual_seed(0)
    net = Net().double()
    return net if mesh is None else parallelize_module(net, mesh, plan(between))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def errors(between: Any, lengths: list[int], inner: str) -> tuple[float, list[float], int]:
    """Of loss and gradients, from one process's, the largest; the shares of matrix work on shards; bytes that were
    gathered for anything but outputs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    whole, net, worst, before = made(), made(mesh["tp"], between), 0.0, len(ringopt.reports())
    net.compile(backend="ring", options={"mesh": mesh["cp"], "inner_backend": inner})
    for length in lengths:
        ids = torch.randint(WORDS, (3, length), generator=torch.Generator().manual_seed(length))
        losses = [F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) for model in (whole, net)]
        for loss in losses:
            loss.backward()
        worst = worst_of(worst, abs(losses[0].item() - losses[1].item()))
        for expected, p in zip(whole.parameters(), net.parameters(), strict=True):
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            worst = worst_of(worst, (found - expected.grad).abs().max().item())
    reports = ringopt.reports()[before:]
    gathered = sum(gather.bytes for report in reports for gather in report.gathers if gather.op != "output")
    return worst, [report.sharded_fraction for report in reports], gathered


@pytest.mark.parametrize(
    "between, inner, lengths",
    [
        (Shard(1), "aot_eager", [12]),
        *(pytest.param(how, "aot_eager", [12, 20], marks=pytest.mark.zoo) for how in (Replicate(), Shard(1))),
        *(pytest.param(how, "inductor", [12, 20], marks=pytest.mark.zoo) for how in (Replicate(), Shard(1))),
    ],
)
def test_the_sequence_is_shared_beside_the_weights(
    ranks: Callable[..., list[Any]], between: Any, inner: str, lengths: list[int]
) -> None:
    for worst, shares, gathered in ranks(4, errors, between, lengths, inner):
        assert worst < 1e-14
        assert shares == [1.0] * len(lengths) and not gathered


def on_ranks_that_share() -> list[str]:
    """Of a model whose weights are spread over the ranks that share the sequence, and over ranks of other places."""
    found = []
    grid = torch.arange(4).view(2, 2)
    shifted = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("none", "tp"))
    cp = DeviceMesh("cpu", grid.T.contiguous(), mesh_dim_names=("none", "cp"))["cp"]
    for tp in (cp, shifted["tp"]):
        torch._dynamo.reset()
        net = made(tp, Replicate())
        net.compile(backend="ring", options={"mesh": cp, "inner_backend": "aot_eager", "on_refusal": "ignore"})
        ids = torch.arange(12).view(1, 12)
        assert torch.allclose(net(ids), made()(ids))
        found.append(str(ringopt.reports()[-1].refusal))
    return found


def test_ranks_that_hold_other_tokens_share_no_weights(ranks: Callable[..., list[Any]]) -> None:
    for same, others in ranks(4, on_ranks_that_share):
        assert "share this rank's sequence too" in same and "make both meshes of one" in same
        assert "its ranks are numbers" in others


def test_a_pretended_rank_asks_nobody_for_its_place() -> None:
    """As where a file is converted in one process: nothing can be sent, and no graph runs there."""
    nobody: Any = None
    assert why_not_across(PretendedMesh(0, 2), nobody) == ""


# ---- what the graph becomes ------------------------------------------------------------------------------------------


def graph_of(call: Callable[[Any, Any], Any], x: Tensor, weight: Any) -> Any:
    """Of Dynamo."""
    graphs: list[Any] = []

    def keep(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(call, backend=keep, fullgraph=True)(x, weight)
    return graphs[0]


def project(x: Tensor, weight: DTensor) -> Tensor:
    """Rows of x are whole, and each rank has some of the columns of what is added up."""
    spread = DTensor.from_local(x, weight.device_mesh, [Shard(-1)], run_check=False)
    return F.linear(spread, weight).redistribute(placements=[Replicate()]).to_local().relu()


def returned(x: Tensor, weight: DTensor) -> DTensor:
    return F.linear(DTensor.from_local(x, weight.device_mesh, [Shard(-1)], run_check=False), weight)


def dropped(x: Tensor, weight: DTensor) -> Tensor:
    return F.dropout(DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False), 0.5).to_local()


def written(x: Tensor, weight: DTensor) -> Tensor:
    y = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False).to_local()
    return y.add_(1) + x


def doubled(x: Tensor, weight: DTensor) -> Tensor:
    weight.mul_(2)
    return project(x, weight)


def cast_within(x: Tensor, weight: DTensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return project(x, weight)


def taken_apart() -> dict[str, Any]:
    """What each call becomes, or why it is refused, on one rank of a mesh of its own."""
    mesh = init_device_mesh("cpu", (1,))
    x, found = torch.randn(2, 5, WIDTH, requires_grad=True), dict[str, Any]()
    for call in (project, returned, dropped, written, doubled, cast_within):
        weight = DTensor.from_local(torch.randn(4, WIDTH), mesh, [Shard(1)])
        own = nn.Parameter(weight, requires_grad=call is not doubled)
        given = x if call is not written else x.detach()
        try:
            graph = graph_of(call, given, own)
            gm, around = with_local_tensors(graph)
            inputs = [[node.name for node in x.graph.find_nodes(op="placeholder")] for x in (graph, gm)]
            found[call.__name__] = ({str(node.target) for node in gm.graph.nodes}, list(around.outputs))
            found[f"inputs of {call.__name__}"] = (*inputs, list(around.meshes))
        except GraphRefused as refused:
            found[call.__name__] = refused.refusal.sentence
    return found


def test_a_message_under_way_is_waited_for() -> None:
    given = [7, AsyncCollectiveTensor(torch.ones(2))]
    number, entered = DTensorBoundary(nothing=False).entering(given)
    assert number == 7 and type(entered) is Tensor and torch.equal(entered, torch.ones(2))


def test_calls_on_dtensors_are_functions_of_local_tensors(ranks: Callable[..., list[Any]]) -> None:
    [found] = ranks(1, taken_apart)
    nodes, outputs = found["project"]
    assert "autograd_function_apply" in nodes and "redistribute" not in nodes
    assert not outputs and found["returned"][1] == [0]  # which leaves as the DTensor that it is
    before, after, meshes = found["inputs of project"]  # among which the mesh keeps its place
    assert before == after and [place for place, name in enumerate(after) if "mesh" in name] == meshes
    assert "random numbers are drawn" in found["dropped"]
    assert "has the memory of a tensor beside it" in found["written"]
    assert "written to in place" in found["doubled"]
    assert "enter it around the call" in found["cast_within"]


@pytest.mark.parametrize(
    "name, dims", [("all_reduce", [0, 1]), ("all_gather_into_tensor", [1]), ("reduce_scatter_tensor", [1])]
)
def test_along_which_dims_a_message_goes_token_by_token(name: str, dims: list[int]) -> None:
    """The first is that along which parts of ranks are joined."""
    graph = fx.Graph()
    node = graph.call_function(getattr(torch.ops._c10d_functional, name).default, (graph.placeholder("x"), 2, "group"))
    node.meta["val"] = node.args[0].meta["val"] = torch.empty(4, 6)
    rule = rule_of(node)
    assert rule is not None and [sorted(along) for along in rule.operands] == [dims]
