"""Tensors that Dynamo's graph holds are inputs like others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ringopt.torch_compat.dynamo import guard_source_of
from ringopt.torch_compat.dynamo_attributes import followed_by, with_attributes_as_inputs


def graph_of(run: Any, *given: Any) -> fx.GraphModule:
    """What Dynamo makes of the second call."""
    found = list[fx.GraphModule]()

    def backend(gm: fx.GraphModule, _inputs: Any) -> Any:
        found.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend)
    for _ in range(2):
        compiled(*given)
    return found[-1]


def test_states_of_an_optimizer() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], 0.5, momentum=0.5)
    given = graph_of(optimizer.step)
    gm, held = with_attributes_as_inputs(given)
    assert [x.data_ptr() for x in held] == [weight.data_ptr(), optimizer.state[weight]["momentum_buffer"].data_ptr()]
    assert not gm.graph.find_nodes(op="get_attr") and given.graph.find_nodes(op="get_attr")
    assert guard_source_of(gm.graph.find_nodes(op="placeholder")[-1]) != ""
    run, before = followed_by(gm, held), weight.detach().clone()
    with torch.no_grad():
        run(torch.ones(2))
    assert torch.equal(weight, before - 0.5 * optimizer.state[weight]["momentum_buffer"])


def test_a_tensor_that_is_read_twice_is_one_input() -> None:
    x = torch.ones(2)
    torch._dynamo.mark_static_address(x, guard=True)

    def program(y: Tensor) -> Tensor:
        return y * x + x

    gm, held = with_attributes_as_inputs(graph_of(program, torch.ones(2)))
    assert len(held) == 1 and held[0] is x
    x.fill_(3)
    assert followed_by(gm, held)(torch.ones(2))[0].tolist() == [6, 6]


def test_a_graph_that_holds_none_is_left_as_it_is() -> None:
    given = graph_of(torch.sin, torch.ones(2))
    gm, held = with_attributes_as_inputs(given)
    assert gm is given and held == [] and followed_by(gm, held) is gm
