"""A transfer to the device beside compute: on a GPU by its copy engine, from pinned memory on a stream of its own; on a
CPU by another thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ringopt.tools.benchmarks.lab.timing import interleaved

MOST = 1000  # copies


class Copy:
    """Of tensors like `given`, from the host to their device."""

    def __init__(self, given: Sequence[Tensor]):
        self.on_gpu = given[0].device.type == "cuda"
        self.sources = [x.to("cpu", copy=True) for x in given]
        if self.on_gpu:
            self.sources = [x.pin_memory() for x in self.sources]
            self.stream = torch.cuda.Stream(given[0].device)
        else:
            self.threads = ThreadPoolExecutor(1)
        self.targets = [torch.empty_like(x) for x in given]
        self.times = 1

    @property
    def nbytes(self) -> int:
        return self.times * sum(x.nbytes for x in self.targets)

    def last(
        self, compute: Callable[[], object], synchronized: Callable[[Callable[[], object]], Callable[[], object]]
    ) -> None:
        """Copies so often from now on that it takes about half as long as `compute`: what is over in a moment shows
        nothing."""
        runs = {"copy": synchronized(self.alone), "compute": compute}
        interleaved(runs, 1)
        seconds = interleaved(runs, 3)
        self.times = min(MOST, max(1, round(seconds["compute"] / seconds["copy"] / 2)))

    def alone(self) -> list[Tensor]:
        return self.during(lambda: [])

    def during(self, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        """What `compute` gives; whoever reads it has the copies too."""
        if self.on_gpu:
            return self._on_a_stream(compute)
        copied = self.threads.submit(self._copy)
        found = compute()
        copied.result()
        return found

    def _on_a_stream(self, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._copy()
        found = compute()
        torch.cuda.current_stream().wait_stream(self.stream)
        return found

    def _copy(self) -> None:
        for _ in range(self.times):
            for target, source in zip(self.targets, self.sources, strict=True):
                target.copy_(source, non_blocking=True)
