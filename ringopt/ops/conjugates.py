"""Conjugates: the call that the backward of an operator makes, for the table of traits (traits.py). Each function takes
the call of the forward, and tells of arguments those that say what is sent. Tests compare the bytes that these calls
send with those of autograd.
"""

from __future__ import annotations

import torch

from ringopt.ops.sized_call import Operand, SizedCall


def gather(call: SizedCall) -> SizedCall:
    """Of scatter."""
    return call.conjugate("gather", call.arguments["x"], x=call.value)


def scatter(call: SizedCall) -> SizedCall:
    """Of gather."""
    return call.conjugate("scatter", call.arguments["x"], x=call.value)


def reduce_from_group(call: SizedCall) -> SizedCall:
    """Of copy_to_group."""
    return call.conjugate("reduce_from_group", call.value)


def reduce_bucket(call: SizedCall) -> SizedCall:
    """Of copy_all_to_group."""
    return call.conjugate("reduce_bucket", call.value, grads=call.arguments["parameters"])


def count_of_equals(call: SizedCall) -> SizedCall:
    """Of extreme: how many elements share the gradient."""
    counts = Operand(call.result.sizes, torch.int64)
    return call.conjugate("reduce_from_group", counts, x=counts)


def running_sum(call: SizedCall) -> SizedCall:
    """A running sum from the other end."""
    return call.conjugate("running_sum", call.arguments["x"], x=call.value)


def return_rows(call: SizedCall) -> SizedCall:
    """Of fetch_rows."""
    return call.conjugate("return_rows", call.arguments["x"], grad=call.value)


def add_to_rows(call: SizedCall) -> SizedCall:
    """Of look_up_rows."""
    return call.conjugate("add_to_rows", call.arguments["x"], grad=call.value)


def convolve_rows_backward(call: SizedCall) -> SizedCall:
    """The gradients of input, weight and bias."""
    return call.conjugate("convolve_rows_backward", call.arguments["x"], grad=call.value)


def respread(call: SizedCall) -> SizedCall:
    """The reshard between the same placements, from new to old."""
    return back(call, "respread")


def turn(call: SizedCall) -> SizedCall:
    """The all-to-all between the same dims, from new to old."""
    there = call.arguments
    return back(call, "turn", dim=there["new_dim"], new_dim=there["dim"])


def back(call: SizedCall, name: str, **dims: object) -> SizedCall:
    """The call with placements and layouts exchanged."""
    there = call.arguments
    where = {"old": there["new"], "new": there["old"]}
    layouts = {"old_layout": there["new_layout"], "new_layout": there["old_layout"]}
    return call.conjugate(name, there["x"], x=call.value, **where, **layouts, **dims)


def attention_backward(call: SizedCall) -> SizedCall:
    """Of ring_attention and dilated_attention. Its first result is the gradient of the queries."""
    return call.conjugate(f"{call.name}_backward", call.arguments["q"])


def picked_backward(call: SizedCall) -> SizedCall:
    """Of picked, where all its operands have gradients."""
    return call.conjugate("picked_backward", call.arguments["operands"])


def scan_backward(call: SizedCall) -> SizedCall:
    """Of scan, where all its operands have gradients."""
    return call.conjugate("scan_backward", [x for part in ("init", "xs", "consts") for x in call.arguments[part]])


def sharded_scan_backward(call: SizedCall) -> SizedCall:
    """Of sharded_scan."""
    back = scan_backward(call)
    return back.conjugate("sharded_scan_backward", back.value)


def sharded_kernel_scan_backward(call: SizedCall) -> SizedCall:
    """Of sharded_kernel_scan, where all its operands have gradients."""
    operands = [call.arguments["state"], *call.arguments["xs"], *call.arguments["shared"]]
    return call.conjugate("sharded_kernel_scan_backward", operands)
