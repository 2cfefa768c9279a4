"""Tensors without numbers, by which graphs are traced."""

from __future__ import annotations

from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "unset_fake_temporarily",
]

# FakeTensorMode(allow_non_fake_inputs=, shape_env=): under it operators give fakes; from_tensor(x, static_shapes=)
#     makes one; a subclass may change what its __torch_dispatch__ gives.
# FakeTensor: has the fake_mode that it was made under.
# unset_fake_temporarily(): a context in which operators compute numbers, though a fake mode is on outside of it.
# detect_fake_mode(): the mode that is on, or that of Dynamo's tracing context; None where there is neither.
# enable_python_dispatcher(): a context in which operators on open sizes run torch's Python forms of their kernels.
# DataDependentOutputException, DynamicOutputShapeException: a number or a size would have to be known; `func` says of
#     which operator.
