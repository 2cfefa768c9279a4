"""Whether the step of a scan is affine in what it carries, by reading its graph.

    prove(text, kinds) -> Affine | Refusal
"""

from __future__ import annotations

from dataclasses import dataclass

from ringopt.ir.refusal import Refusal
from ringopt.scans.trace import Kinds


@dataclass(frozen=True)
class Affine:
    """A step that is affine, stage by stage."""

    text: str
    kinds: Kinds


def prove(text: str, kinds: Kinds) -> Affine | Refusal:
    """Of the body `text` on operands of such kinds (`ScanCall.kinds`)."""
    return Refusal("proofs come with the next commit")
