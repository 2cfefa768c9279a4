"""Words for a mask: a condition without a name is written out, as long as it fits a line of the report."""

from __future__ import annotations

import torch

from ringopt.expr.evaluate import show
from ringopt.expr.simplify import apply, compare
from ringopt.expr.terms import affine
from ringopt.recognize.mask_names import LONGEST, name_of_mask


def test_a_condition_is_written_out_up_to_the_longest() -> None:
    both = apply("remainder", [affine({"q": 1, "k": 1}, 0), 10**18], torch.int64)
    for number, written in ((10**18, True), (-(10**18), False)):  # the sign is one character too many
        condition = compare("ne", both, number)
        text = show(condition)
        assert len(text) == LONGEST + (not written)
        name = name_of_mask("causal", [condition], None, lambda source: False)
        assert name == f"causal & {text if written else 'mask'}"
