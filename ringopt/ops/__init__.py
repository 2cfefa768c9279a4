"""The `ringopt::` operators, which compiled graphs and converted programs call. Importing this package defines them."""

import ringopt.ops.all_to_all
import ringopt.ops.argmax
import ringopt.ops.async_gather
import ringopt.ops.attention
import ringopt.ops.collectives
import ringopt.ops.convolution
import ringopt.ops.custom_gradient
import ringopt.ops.dilated
import ringopt.ops.dropout
import ringopt.ops.fetch_rows
import ringopt.ops.flex
import ringopt.ops.gradient_buckets
import ringopt.ops.local_length
import ringopt.ops.prefix_sum
import ringopt.ops.reshard
import ringopt.ops.ring
import ringopt.ops.ring_backward_split
import ringopt.ops.tabulate  # noqa: F401
