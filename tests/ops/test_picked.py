"""A stretch whose sizes data decide, as one operator: what it gives is in memory of its own."""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.ops import operators as ops
from ringopt.ops.picked import sizes_text
from ringopt.scans.body import to_text

aten = torch.ops.aten


def called(body, x):
    graph = fx.Graph()
    graph.output((body(graph, graph.placeholder("x")),))
    text = to_text(fx.GraphModule({}, graph), 0, 1, 0)
    return ops.picked([x], text, sizes_text(x.dtype, list(x.shape)), [0], [0], 0)


def test_what_is_given_and_what_comes_out_share_no_memory():
    """A compiler that is not told of shared memory writes the one and reads the other."""
    x = torch.randn(4, 3)
    for body in (lambda graph, x: x, lambda graph, x: graph.call_function(aten.view.default, (x, [4, 3]))):
        found = called(body, x)
        assert torch.equal(found, x) and found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_gradients_are_those_of_the_body():
    x = torch.randn(4, 3, requires_grad=True)
    called(lambda graph, x: graph.call_function(aten.mul.Tensor, (x, x)), x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_gradients_of_complex_numbers():
    x = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    called(lambda graph, x: graph.call_function(aten.mul.Tensor, (x, x)), x).abs().sum().backward()
    found, x.grad = x.grad, None
    (x * x).abs().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_what_the_body_does_not_read_has_zeros():
    x, y = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    graph = fx.Graph()
    read, _ = (graph.placeholder(name) for name in "xy")
    graph.output((graph.call_function(aten.sin.default, (read,)),))
    text = to_text(fx.GraphModule({}, graph), 0, 2, 0)
    ops.picked([x, y], text, sizes_text(x.dtype, list(x.shape)), [0, 0], [0], 0).sum().backward()
    assert torch.equal(y.grad, torch.zeros(4, 3)) and torch.equal(x.grad, x.detach().cos())
