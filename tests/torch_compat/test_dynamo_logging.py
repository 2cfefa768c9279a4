"""A message of the program does not end its graph: it is logged when the graph is traced, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ringopt.torch_compat.dynamo_logging import log_while_tracing

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
