"""How tensors of which a rank has some rows lie in memory."""

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ringopt.ir.memory import lies_in_order


def test_the_order_of_dims_is_known_where_the_number_of_rows_is_not() -> None:
    """Beside strides of a whole tensor of 64 rows: keys of a cache that stay on shards, at a fixed length."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        rows = shapes.create_unbacked_symint()
        torch._check(rows > 1)
        keys = torch.empty(1, rows, 2, 8).transpose(1, 2)
    assert lies_in_order(keys, (1024, 8, 16, 1))
    assert not lies_in_order(keys, (1024, 512, 8, 1))
