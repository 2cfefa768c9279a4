"""One program over several lengths in one process: every call is compared with the program itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from ringopt.drivers.compile import transform
from ringopt.options import Options
from ringopt.report import Report
from tests.harness.threads import run_on_threads
from tests.harness.translation import TOLERANCE, Seat, difference, values_and_gradients


class Lengths:
    """A backend of p pretended ranks that compares every call with the program itself; `reports`: one a compilation."""

    def __init__(self, p: int, **options: Any):
        self.p, self.options = p, Options(**options)
        self.reports: list[Report] = []

    def __call__(self, gm: Any, inputs: Any) -> Any:
        made = [transform(gm, inputs, self.options, Seat(rank, self.p)) for rank in range(self.p)]
        self.reports.append(made[0].report)

        def run(*inputs: Any) -> Any:
            expected = values_and_gradients(gm, inputs)
            found = run_on_threads(self.p, lambda mesh: values_and_gradients(made[mesh.rank].graph or gm, inputs))
            for values in found:
                assert difference(expected, values, TOLERANCE) == ""
            return gm(*inputs)

        return run


def run_over(module: nn.Module, calls: Iterable[Any], p: int, dynamic: bool | None = None, **options: Any) -> Lengths:
    """Runs `module(*call)` for each call, keywords where it is a dict."""
    torch._dynamo.reset()
    backend = Lengths(p, **options)
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    for call in calls:
        compiled(**call) if isinstance(call, dict) else compiled(*call)
    return backend
