"""The `ringopt::` operators, which compiled graphs and converted programs call. Importing this package defines all of
them; who calls one takes it from here, as `operators.gather.default`.
"""

import torch

from ringopt.ops import (
    all_to_all,
    argmax,
    async_gather,
    attention,
    collectives,
    convolution,
    custom_gradient,
    dilated,
    draws,
    dropout,
    fetch_rows,
    flex,
    gradient_buckets,
    local_length,
    mask_facts,
    picked,
    prefix_sum,
    reshard,
    ring,
    ring_backward_split,
    scan,
    scan_start,
    sharded_kernel_scan,
    sharded_scan,
    snapshot,
    tabulate,
)
from ringopt.ops.traits import check_rows
from ringopt.torch_compat.schema import names_of_all_operators

DEFINED_BY = (
    all_to_all, argmax, async_gather, attention, collectives, convolution, custom_gradient, dilated, draws,
    dropout, fetch_rows, flex, gradient_buckets, local_length, mask_facts, picked, prefix_sum, reshard, ring,
    ring_backward_split, scan, scan_start, sharded_kernel_scan, sharded_scan, snapshot,
    tabulate,
)  # fmt: skip
operators = torch.ops.ringopt
# Here, for an operator without a row is known to nobody who counts, orders or compares.
check_rows(names_of_all_operators())
