"""What is known of one attention of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch.fx as fx

from ringopt.ir.nodes import module_path, source_line


@dataclass
class SiteInfo:
    """One attention site; the passes fill it in, the report shows it. `masked`: the program passes a mask; `source`:
    its line of source; `not_dilated`: why the dilation of the options is not applied; `whole`: the side with too few
    tokens to shard, which is replicated; `reason`: the note that explains the choice of the strategy;
    `kernel_there`: that of the hardware which a report is made for."""

    module: str
    form: str
    pattern: str = "full"
    masked: bool = False
    source: str = ""
    strategy: str = "none"
    layout: str = "none"
    kernel: str = "none"
    kernel_there: str = ""
    refusal: str | None = None
    not_dilated: str | None = None
    bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    whole: Literal["", "queries", "keys"] = ""

    @property
    def shown_kernel(self) -> str:
        """The kernel that the report names."""
        return self.kernel_there or self.kernel

    @classmethod
    def at(cls, node: fx.Node, form: str, pattern: str, masked: bool) -> SiteInfo:
        """Of attention that the program has where `node` comes from."""
        return cls(module_path(node), form, pattern, masked, source_line(node))
