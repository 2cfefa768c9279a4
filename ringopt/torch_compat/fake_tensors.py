"""Tensors without numbers, by which graphs are traced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch._prims_common
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "faked_in_order",
    "open_strides_undecided",
    "threads_may_fake",
    "unset_fake_temporarily",
    "without_error_log",
]

# FakeTensorMode(allow_non_fake_inputs=, shape_env=): under it operators give fakes; from_tensor(x, static_shapes=)
#     makes one; a subclass may change what `dispatch`, which its __torch_dispatch__ calls, gives. Results are kept for
#     all modes of a process where its `cache_enabled` says so.
# FakeTensor: has the fake_mode that it was made under.
# unset_fake_temporarily(): a context in which operators compute numbers, though a fake mode is on outside of it.
# detect_fake_mode(): the mode that is on, or that of Dynamo's tracing context; None where there is neither.
# enable_python_dispatcher(): a context in which operators on open sizes run torch's Python forms of their kernels.
# DataDependentOutputException, DynamicOutputShapeException: a number or a size would have to be known; `func` says of
#     which operator.


@contextmanager
def faked_in_order(inputs: Sequence[Any]) -> Iterator[None]:
    """Within it compilers behind Dynamo find the fakes of its inputs, in whatever order they ask for them: made in that
    of Dynamo. Of a tensor that came before its views the sizes would be symbols that no input has."""
    context: Any = TracingContext.try_get()
    contexts = context.tensor_to_context if context is not None and context.fake_mode is not None else {}
    fakes = list[torch.Tensor]()  # which torch finds as long as somebody has them
    for x in inputs:
        how = contexts.get(x) if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) else None
        if how is not None:
            made = context.fake_mode.from_tensor(x, symbolic_context=how, source=how.tensor_source, trace=False)
            fakes.append(made)
    yield


@lru_cache(maxsize=1)
def threads_may_fake() -> None:
    """To be called before a thread that ends enters a mode. Where torch is built for CUDA and finds no GPU, the first
    mode of a process leaves something behind that ends with its thread, and a later one ends the process (2.11)."""
    with FakeTensorMode():
        pass


@contextmanager
def open_strides_undecided() -> Iterator[None]:
    """Within it strides of open sizes are not those of channels_last where that cannot be told. Torch's own function
    means to answer so, and raises where dims of size 1 surround an open one (torch 2.13)."""
    module: Any = torch._prims_common
    decide = module.are_strides_like_channels_last_or_false

    def decided(shape: Sequence[int], strides: Sequence[int]) -> bool:
        try:
            return bool(decide(shape, strides))
        except GuardOnDataDependentSymNode:
            return False

    module.are_strides_like_channels_last_or_false = decided
    try:
        yield
    finally:
        module.are_strides_like_channels_last_or_false = decide


@contextmanager
def without_error_log() -> Iterator[None]:
    """Within it a fake tensor's error is raised as ever, and not written to the log beside, in this thread."""
    logger, here = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def of_other_threads(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(of_other_threads)
    try:
        yield
    finally:
        logger.removeFilter(of_other_threads)
