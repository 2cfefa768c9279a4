"""Fake tensors."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ringopt.torch_compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
    enable_python_dispatcher,
    faked_in_order,
    open_strides_undecided,
    threads_may_fake,
    unset_fake_temporarily,
    without_error_log,
)
from ringopt.torch_compat.symbolic_shapes import ShapeEnv
from ringopt.torch_compat.tracing import TracingContext, tracing


def test_operators_under_a_mode_give_fakes_that_know_it() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=None)
    with mode:
        x = torch.ones(2, 3) @ torch.ones(3, 4)
    assert isinstance(x, FakeTensor) and x.fake_mode is mode and x.shape == (2, 4) and x.device.type == "cpu"
    y = mode.from_tensor(torch.ones(3, 2).t(), static_shapes=True)
    assert isinstance(y, FakeTensor) and y.stride() == (1, 2) and isinstance(y.shape[0], int)
    assert isinstance(x.sum() + torch.ones(()), FakeTensor)  # beside a tensor that is none


def test_numbers_are_computed_below_a_mode() -> None:
    with FakeTensorMode(), unset_fake_temporarily():
        x = torch.ones(2).sum()
    assert not isinstance(x, FakeTensor) and x.item() == 2


def test_what_a_mode_gives_may_be_changed() -> None:
    class Wider(FakeTensorMode):
        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            found = super().__torch_dispatch__(func, types, args, kwargs or {})
            return found.double() if func is torch.ops.aten.sin.default else found

    with Wider():
        assert torch.sin(torch.ones(2)).dtype == torch.float64


def test_the_mode_that_is_on_is_found() -> None:
    assert detect_fake_mode() is None
    mode = FakeTensorMode()
    with mode:
        assert detect_fake_mode() is mode
    with tracing(TracingContext(mode)):
        assert detect_fake_mode() is mode


def test_what_only_numbers_tell_is_an_error_with_the_operator() -> None:
    with FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(DataDependentOutputException) as number:
            x.sum().item()
        with pytest.raises(DynamicOutputShapeException) as size:
            x.nonzero()
    assert "item" in str(number.value.func) or "_local_scalar_dense" in str(number.value.func)
    assert "nonzero" in str(size.value.func)


@pytest.mark.parametrize("enabled", [True, False])
def test_results_are_kept_where_a_mode_says_so(enabled: bool) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.cache_enabled = enabled
    x = mode.from_tensor(torch.ones(7, 3))
    before = FakeTensorMode.cache_info()
    with mode:
        x.sin()
    assert (FakeTensorMode.cache_info() != before) == enabled


def test_open_sizes_go_through_python_kernels() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(7, 3))
    with mode, enable_python_dispatcher():
        product = torch.ops.aten.matmul.default(x, torch.ones(3, 2))
    assert isinstance(product.shape[0], torch.SymInt) and product.shape[1] == 2


def test_how_an_open_size_among_ones_lies_in_memory_is_left_open() -> None:
    with FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True)) as mode, open_strides_undecided():
        size = torch.ones((), dtype=torch.int64).item()
        x = torch.ones(2, 1, size, 1)  # type: ignore[arg-type]
        assert (-x).stride()[-1] == 1 and x.fake_mode is mode  # type: ignore[attr-defined]


def test_an_error_that_is_told_is_not_in_the_log_too() -> None:
    told = list[logging.LogRecord]()
    logger, handler = logging.getLogger(FakeTensorMode.__module__), logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]

    def fails() -> None:
        with FakeTensorMode() as mode, pytest.raises(RuntimeError):
            torch.ops.aten.split_with_sizes(mode.from_tensor(torch.ones(4)), [1, 1])

    logger.addHandler(handler)
    try:
        with without_error_log():
            fails()
            assert told == []
            with ThreadPoolExecutor(1) as pool:
                pool.submit(fails).result()  # of another thread
            assert len(told) == 1
        fails()
        assert len(told) == 2
    finally:
        logger.removeHandler(handler)


def test_a_compiler_finds_the_fakes_that_are_made_before() -> None:
    found = list[int]()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        mode: Any = TracingContext.get().fake_mode
        known = mode.fake_tensor_converter.meta_converter.tensor_memo
        found.append(len(known))
        with faked_in_order(inputs):
            found.append(len(known))
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x, y: x + y, backend=backend, dynamic=True)(torch.ones(5), torch.ones(5))
    with faked_in_order([torch.ones(2)]):  # where nothing is compiled
        assert found == [0, 2]


def in_threads_that_end() -> None:
    """In a process whose first modes these are."""

    def fake() -> bool:
        with FakeTensorMode():
            return isinstance(torch.empty(2), FakeTensor)

    threads_may_fake()
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(fake).result()


def test_threads_that_end_may_fake() -> None:
    """(Without it torch 2.11 for CUDA, where there is no GPU, ends the process.)"""
    words = f"import {__name__} as here; here.in_threads_that_end()"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
