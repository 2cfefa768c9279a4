"""The `ringopt::` operators, which compiled graphs and converted programs call. Importing this package defines them."""

import ringopt.ops.attention
import ringopt.ops.convert
import ringopt.ops.convolution
import ringopt.ops.custom_gradient
import ringopt.ops.dilated
import ringopt.ops.dropout
import ringopt.ops.extreme
import ringopt.ops.flex
import ringopt.ops.gathering
import ringopt.ops.gradients
import ringopt.ops.homeward
import ringopt.ops.prefix
import ringopt.ops.respread
import ringopt.ops.ring
import ringopt.ops.rows
import ringopt.ops.rows_here
import ringopt.ops.tabulate
import ringopt.ops.turn  # noqa: F401
