"""Rules for the operators that Transformer Engine registers for its softmax (2.20 and later), by their schemas.

    te_softmax::scaled_softmax_fwd(inputs [B, H, Sq, Sk], scale)
    te_softmax::scaled_masked_softmax_fwd(inputs [B, H, Sq, Sk], mask [B or 1, 1, Sq, Sk], scale)

Each row of scores is by itself, so queries stay on shards. Its modules switch Dynamo off and come into no graph.
"""

from __future__ import annotations

from ringopt.rules.declare import rule

ROWS = 2


def declare_transformer_engine() -> None:
    """All, for the registry."""
    rule("te_softmax::scaled_softmax_fwd", tokenwise=ROWS)
    rule("te_softmax::scaled_masked_softmax_fwd", tokenwise={"inputs": ROWS, "mask": ROWS})
    for causal in ("upper_triang", "aligned_causal"):
        rule(f"te_softmax::scaled_{causal}_masked_softmax_fwd", gathered="it counts the rows that it is given")
