"""Sizes as nodes: each is computed from inputs, which come before all else."""

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.ir.symbolic_sizes import into_arguments, into_nodes


def test_an_input_that_is_read_before_the_next_one():
    gm = make_fx(lambda x, y: x.new_zeros(y.shape[0]) + y, tracing_mode="symbolic")(torch.ones(3), torch.ones(5))
    into_arguments(gm.graph)
    x, y = gm.graph.find_nodes(op="placeholder")
    zeros: fx.Node = next(iter(x.users))
    y.prepend(zeros)  # as an input is cut into rows as soon as it is there
    into_nodes(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(torch.ones(2), torch.ones(4)), torch.ones(4))
