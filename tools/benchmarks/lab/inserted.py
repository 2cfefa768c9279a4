"""The attention operator as the compiler inserts it."""

from __future__ import annotations

from torch import Tensor

from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.ops import operators
from ringopt.ops.ring import VERSION, Config
from ringopt.tools.benchmarks.lab.peers import Run


def inserted(sharded: ShardedPattern, strategy: str, scale: float, group: str) -> Run:
    """`ringopt::ring_attention` of a rank's q, k, v without mask, dropout and sinks, over the mesh named `group`."""
    config = Config(
        sharded.q_length,
        sharded.kv_length,
        sharded.pattern,
        mask="",
        learned=[],
        dropout_p=0.0,
        scale=scale,
        q_layout=sharded.q_layout,
        kv_layout=sharded.kv_layout,
        strategy=strategy,
        kernel="auto",
        group=group,
        version=VERSION,
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = operators.ring_attention(q, k, v, [], None, None, *config.plain)[0]
        return out

    return run
