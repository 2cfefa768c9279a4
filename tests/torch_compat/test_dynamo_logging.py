"""A message of the program, or a warning, does not end its graph: it is given when the graph is traced, once."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx

import ringopt
from ringopt.torch_compat.dynamo_logging import log_while_tracing, warn_while_tracing

LOGGER = logging.getLogger(__name__)


def speaking(x: Tensor) -> Tensor:
    y = x.sin()
    LOGGER.info("a message of %s", "words")
    return y + 1


def speaking_of_numbers(x: Tensor) -> Tensor:
    y = x.sin()
    LOGGER.info("a sum of %s", y.sum())
    return y + 1


class Counting:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return gm


def test_a_message_is_logged_once_for_all_traces(caplog: pytest.LogCaptureFixture) -> None:
    log_while_tracing()
    caplog.set_level(logging.INFO)
    graphs = Counting()
    compiled = torch.compile(speaking, backend=graphs)
    for rows in (8, 6):
        torch.testing.assert_close(compiled(torch.ones(rows)), torch.ones(rows).sin() + 1)
    assert caplog.messages == ["a message of words"] and graphs.count == 2


def test_a_message_of_numbers_is_left_to_dynamo() -> None:
    log_while_tracing()
    graphs = Counting()
    torch.compile(speaking_of_numbers, backend=graphs)(torch.ones(3))
    assert graphs.count == 2


def warned(x: Tensor) -> Tensor:
    warnings.warn("a model of old", DeprecationWarning, stacklevel=2)
    return x + 1


def warning(x: Tensor) -> Tensor:
    return warned(x.sin())


def test_a_warning_is_given_once_for_all_traces_and_names_the_line_that_eager_names() -> None:
    warn_while_tracing()
    globals().pop("__warningregistry__", None)
    given = []
    for called in (torch.compile(warning, backend=(graphs := Counting())), warning):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for rows in (8, 6):
                torch.testing.assert_close(called(torch.ones(rows)), torch.ones(rows).sin() + 1)
        given.append([(str(one.message), one.category, one.filename, one.lineno) for one in caught])
    assert graphs.count == 2 and given[0] == given[1] and len(given[0]) == 1


def test_a_warning_that_is_an_error_ends_the_program_as_in_eager() -> None:
    warn_while_tracing()
    with warnings.catch_warnings(), pytest.raises(DeprecationWarning, match="a model of old"):
        warnings.simplefilter("error")
        torch.compile(warning, backend=Counting())(torch.ones(3))


def warning_on_one_rank(x: Tensor) -> Tensor:
    x = x.sin()
    if dist.get_rank() == 0:
        warnings.warn("this form will go", stacklevel=2)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def on_rank() -> tuple[float, list[float]]:
    x, before = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(0)), len(ringopt.reports())
    compiled = torch.compile(warning_on_one_rank, backend="ring", options={"inner_backend": "aot_eager"})
    error = (compiled(x) - warning_on_one_rank(x)).abs().max().item()
    return error, [report.sharded_fraction for report in ringopt.reports()[before:]]


def test_ranks_of_which_one_warns_have_one_program(ranks: Any) -> None:
    for error, shares in ranks(2, on_rank):
        assert error < 1e-6 and shares == [1.0]
