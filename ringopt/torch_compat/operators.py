"""Operators of ATen whose names begin with an underscore, as graphs and kernels of ours name them.

What such an operator computes is in its schema, which files of torch.export hold, so it changes seldom; that it is the
one that a tracer or a decomposition writes is what is relied on. Those of attention are in sdpa.py.
"""

from __future__ import annotations

import torch

__all__ = [
    "ASSERT_SCALAR", "ASSERT_TENSOR", "GIVES_MEMORY", "KERNEL_ORDERED_NORMS", "SAFE_SOFTMAX", "TO_COPY",
    "UNSAFE_VIEW",
]  # fmt: skip

aten = torch.ops.aten

# A cast, as make_fx and autocast write it: (x, *, dtype=...), always a copy.
TO_COPY = aten._to_copy.default

# A view of what was just made contiguous, as decompositions of matmul write it: (x, sizes).
UNSAFE_VIEW = aten._unsafe_view.default

# (condition, message): raises RuntimeError where the condition on sizes is false when a graph runs.
ASSERT_SCALAR = aten._assert_scalar.default

# The same of a tensor of one element, as Dynamo writes `assert`: (condition), (condition, message).
ASSERT_TENSOR = (torch._assert_async, aten._assert_async.default, aten._assert_async.msg)

# What gives a tensor the memory of another one, by name: (x, source). As the second Dynamo writes `x.data = source`,
# from torch 2.14 on.
GIVES_MEMORY = {"set_": torch.Tensor.set_}
if hasattr(aten, "shallow_copy_data_"):
    GIVES_MEMORY["shallow_copy_data_"] = aten.shallow_copy_data_

# Softmax along a dim that is 0 where all of a row is -inf: (x, dim).
SAFE_SOFTMAX = aten._safe_softmax.default

# Batch norms under autograd and torch.export, whose first result lies in the CPU's memory format.
KERNEL_ORDERED_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_no_update.default,
)
