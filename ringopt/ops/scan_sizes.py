"""A scan at sizes that are numbers: its body, its proof, what it computes and what travels; for the table of traits."""

from __future__ import annotations

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ops.scan_segments import message_dtype
from ringopt.ops.sized_call import SizedCall
from ringopt.scans.affine import AffineStep, Stage, in_levels
from ringopt.scans.body import Body, from_text
from ringopt.scans.kernel import ScanKernel, frame_of
from ringopt.scans.segment_map import Frame, wide
from ringopt.scans.trace import Kinds, OperandKind, sized


def operand_kinds(call: SizedCall) -> Kinds:
    """Of the operands of a step."""
    device = from_text(call["body"]).device
    # Of the steps of a rank nothing is asked: how many they are may be known at run time only.
    rows = [OperandKind(tuple(map(x.size, range(1, len(x.shape)))), x.dtype, device) for x in call["xs"]]
    init, consts = ([OperandKind(x.sizes, x.dtype, device) for x in call[name]] for name in ("init", "consts"))
    return (*init, *rows, *consts)


def step_of(call: SizedCall) -> Body:
    """The body of a scan, each value with its sizes."""
    return sized(call["body"], operand_kinds(call))


def affine_of(call: SizedCall) -> AffineStep:
    """The step of a scan over ranks. Raises Open."""
    return in_levels(call["body"], operand_kinds(call))


def stages_of(call: SizedCall) -> list[Stage]:
    """Level by level."""
    return [stage for level in affine_of(call).levels for stage in level]


def graphs_run(call: SizedCall) -> list[tuple[fx.Graph, int]]:
    """What a rank runs in each step to know the map of its segments, and how often."""
    found = []
    for stage in stages_of(call):
        found += [(stage.step.graph, 1), (stage.linear.graph, Frame(stage).runs)]
    return found


def maps_bytes(call: SizedCall) -> int:
    """The maps of a rank's segments, which it tells each other rank; states alone where no segment is between the first
    and the last, or where they are handed on."""
    if not affine_of(call).levels:
        return handed_on_bytes(call)
    levels, whole = affine_of(call).levels, segments_between(call) > 0
    each = sum(message_dtype(level).itemsize * sum(Frame(stage).numbers(whole) for stage in level) for level in levels)
    return each * segments_here(call)


def maps_again_bytes(call: SizedCall) -> int:
    """In a backward for which they were not kept."""
    again = call["segments"] == 0 and affine_of(call).levels
    return maps_bytes(call) if again and segments_between(call) > 0 else 0


def ends_bytes(call: SizedCall) -> int:
    """The last carries, where they are read."""
    return carries_bytes(call) if call["ends"] else 0


def handed_on_bytes(call: SizedCall) -> int:
    """The carries between all segments, each told to all ranks."""
    return carries_bytes(call) * (segments_here(call) * call.ranks - 1)


def carries_bytes(call: SizedCall) -> int:
    """All that is carried, in a message."""
    carries = call["init"]
    return max((wide(x.dtype).itemsize for x in carries), default=0) * sum(int(x.count) for x in carries)


def gradients_bytes(call: SizedCall) -> int:
    """The gradients of the states before them; of a max-plus stage, by how much a state comes through them too."""
    if not affine_of(call).levels:
        return handed_on_bytes(call)
    each = 0
    for level in affine_of(call).levels:
        for stage in level:
            _matrix, (point, mixed, free) = Frame(stage).parts
            twice = 2 if stage.form == "max-plus" else 1
            each += message_dtype(level).itemsize * point * mixed * free * twice
    return each * segments_here(call)


def states_bytes(call: SizedCall) -> int:
    """The states before each step of a rank."""
    steps: int = layout_of(call["layout"], call["steps"], call.ranks).most
    each: int = sum(x.bytes for x in call["init"])
    return steps * each


def segments_here(call: SizedCall) -> int:
    """Of a rank."""
    return layout_of(call["layout"], call["steps"], call.ranks).chunks_per_rank


def segments_between(call: SizedCall) -> int:
    """Those that are neither the first nor the last."""
    return segments_here(call) * call.ranks - 2


# ---- of a recurrence that a kernel computes --------------------------------------------------------------------------
def kernel_maps_bytes(call: SizedCall) -> int:
    """The maps of a rank's segments; of a state that is not affine, the state behind each segment of all."""
    axes = ScanKernel.read(call["kernel"]).axes
    if axes is None:
        return kernel_states_bytes(call, call["segments"])
    state = call["state"]
    frame = frame_of(axes, OperandKind(state.sizes, state.dtype, "cpu"))
    return wide(state.dtype).itemsize * frame.numbers() * segments_here(call)


def kernel_gradients_bytes(call: SizedCall) -> int:
    """The gradients of the states before a rank's segments; of a state that is not affine, before all segments."""
    affine = ScanKernel.read(call["kernel"]).axes is not None
    return kernel_states_bytes(call, segments_here(call) if affine else call["segments"])


def kernel_states_bytes(call: SizedCall, segments: int) -> int:
    """A state of each of so many segments."""
    return int(wide(call["state"].dtype).itemsize * call["state"].count * segments)
