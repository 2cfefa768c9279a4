"""One graph rewrite a file, named as the pass is named in logs, options and tests. `LINE` is their order.

`UNDERSTAND` is the part that one process needs too: attention with its mask in the cheapest form.
"""

from collections.abc import Iterable

from ringopt.errors import OptionError
from ringopt.options import Options
from ringopt.passes.canonicalize import Canonicalize
from ringopt.passes.choose_strategy import ChooseStrategy
from ringopt.passes.classify_mask import ClassifyMask
from ringopt.passes.contract import Contract
from ringopt.passes.dilate import Dilate
from ringopt.passes.draw_by_position import DrawByPosition
from ringopt.passes.find_attention import FindAttention
from ringopt.passes.find_flex import FindFlex
from ringopt.passes.find_scan import FindScan
from ringopt.passes.find_softmax import FindSoftmax
from ringopt.passes.find_substitution import FindSubstitution
from ringopt.passes.find_unfused import FindUnfused
from ringopt.passes.lower import Lower
from ringopt.passes.normalize import Normalize
from ringopt.passes.recompute import Recompute
from ringopt.passes.schedule import Schedule
from ringopt.passes.shard_sequence import ShardSequence
from ringopt.passes.split_weights import SplitWeights
from ringopt.passes.strip_repeat_kv import StripRepeatKv
from ringopt.passes.sync_gradients import SyncGradients
from ringopt.passes.unroll_scan import UnrollScan
from ringopt.pipeline import Pass

UNDERSTAND = (
    Normalize(),  # functional: values may be read anywhere
    FindSubstitution(),  # a triangular system is one solve, which may be a part of a step
    FindScan(),  # recurrences are one node each, while their steps stand in the order in which they were traced
    Canonicalize(),  # in one order on all ranks: what is decided in the order of the graph is decided alike
    Contract(),  # products that are summed over are one node each
    FindSoftmax(),  # every softmax is one node
    SplitWeights(),  # and each has products of its own
    FindAttention(),  # every attention that is called is one canonical node
    FindFlex(),  # so is every call of flex_attention, its mods read
    FindUnfused(),  # and every one that is spelled out, its mask read
    StripRepeatKv(),  # K and V have only their own heads
    ClassifyMask(),  # no [n, n] mask is left: a pattern, and a term evaluated block by block
    Dilate(),  # where options ask for it, self-attention is dilated or says why not
    DrawByPosition(),  # random numbers are the same on any number of ranks
)

ALONE = (*UNDERSTAND, Lower(), UnrollScan())  # of one process: nothing is spread, and outputs have their strides

LINE = (
    *UNDERSTAND,
    ChooseStrategy(),  # every site has a strategy and a kernel, or a refusal
    ShardSequence(),  # every value is replicated or sharded
    SyncGradients(),  # the gradients of parameters travel in buckets, or are left to a wrapper
    Lower(),  # local sizes are known and right; outputs have their strides
    UnrollScan(),  # short scans of one process are compiled step by step
    Recompute(),  # what a checkpoint computes again sends nothing
    Schedule(),  # each attention says whether its exchange starts before it
)


def chosen_line(options: Options, ranks: int) -> tuple[Pass, ...]:
    """The passes of a graph, without those that are switched off. Raises OptionError for one that cannot be."""
    optional = [step.name for step in LINE if step.optional]
    for name in options.disable_passes:
        if name not in optional:
            known = name in {step.name for step in LINE}
            why = "is needed for right numbers" if known else "is no pass"
            raise OptionError(f"option disable_passes: {name!r} {why}; these may be left out: {', '.join(optional)}")
    chosen = (step for step in (LINE if ranks > 1 else ALONE) if step.name not in options.disable_passes)
    return with_options(chosen, options)


def with_options(steps: Iterable[Pass], options: Options) -> tuple[Pass, ...]:
    """Each with what `options` say in its fields: no pass reads options from anywhere else."""
    return tuple(step.with_options(options) for step in steps)


def switched_off(options: Options) -> list[str]:
    """For the report: what is lost."""
    return [f"pass {step.name} is switched off: {step.lost}" for step in LINE if step.name in options.disable_passes]
