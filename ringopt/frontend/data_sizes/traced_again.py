"""Programs whose sizes data decide (mixtures of experts) traced as one graph, where Dynamo would break it.

    sizes = counts.tolist()      Dynamo ends its graph here, and what follows is graphs of their own, or none
    rows = where(mask)[0]

On ranks, Dynamo is asked to trace a function that breaks so once more, with such sizes as symbols, for which it has
settings. What is made of them is taken out of the graph again (stretches.py). What no graph comes of is traced as
before: a third time, with its breaks.
"""

from __future__ import annotations

from types import CodeType
from weakref import WeakKeyDictionary

import torch.fx as fx

from ringopt.frontend.data_sizes.stretches import has_picks
from ringopt.torch_compat.dynamo import SIZES_BREAK, Settings, TraceOtherwise, break_reason, frame_being_compiled

# By function, the lines at which it breaks and has to, and the one that is tried.
_with_breaks = WeakKeyDictionary[CodeType, set[str]]()
_tried = WeakKeyDictionary[CodeType, str]()


def give_up(frame: CodeType) -> None:
    """From now on the line that was tried is a break."""
    _with_breaks.setdefault(frame, set()).add(_tried.pop(frame, ""))


_settings = Settings(give_up, capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


def trace_with_sizes(gm: fx.GraphModule, ranks: int) -> None:
    """To be called first in a backend: has Dynamo trace the frame again where `gm`, for several ranks, ends at a
    size."""
    again, broken = _settings.off(), break_reason(gm)
    if again or ranks == 1 or not str(getattr(broken, "reason", "")).startswith(SIZES_BREAK):
        return
    frame, line = frame_being_compiled(), str(broken.user_stack[-1:])
    if line not in _with_breaks.get(frame, ()):
        _tried[frame] = line
        _settings.on()
        raise TraceOtherwise


def trace_with_breaks(gm: fx.GraphModule) -> None:
    """To be called in a backend that leaves `gm` as it is: has Dynamo trace the frame as it would without us."""
    frame = frame_being_compiled()
    if frame in _tried and has_picks(gm):
        give_up(frame)
        raise TraceOtherwise
