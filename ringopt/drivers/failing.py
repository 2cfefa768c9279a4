"""What becomes of a graph of which a pass fails: an assertion that does not hold, an error that nobody foresaw.

Whatever a pass gets wrong, the program is right as it was. So the graph is made once more for the sizes at hand, where
it had open ones, and where that fails too it is left as it was, with the reason in the report and the traceback in the
log. An error may be one rank's alone (its number of rows), and ranks that go different ways would wait for each other
for ever; so as soon as passes know of ranks, all hear of it and take the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringopt.distributed.mesh import Mesh, PretendedMesh
from ringopt.distributed.roll_call.entrance import COMPILES, enter_together
from ringopt.errors import PlanError, RingError, first_line
from ringopt.output.printable import logger
from ringopt.torch_compat.dynamo import TorchDynamoException
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily
from ringopt.torch_compat.symbolic_shapes import GuardAsked, GuardOnDataDependentSymNode

log = logger(__name__)

#: For tests: errors are raised, so that none is taken for a refusal.
RAISES = False

# Not ours to handle: how Dynamo starts again, and what this machine has too little of.
OF_OTHERS = (TorchDynamoException, MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Failure:
    """`sentence` says which pass failed and how; `foreseen`: something is only known when the program runs, so sizes
    have to be fixed."""

    sentence: str
    foreseen: bool = False

    @property
    def refusal(self) -> str:
        return f"{self.sentence}: an error of ringopt, which the log has; the graph runs as it was, and is right"


def is_foreseen(error: Exception) -> bool:
    """Whether a symbolic size decides something, so that specializing it helps."""
    return isinstance(error, GuardOnDataDependentSymNode)


def is_passed_on(error: Exception) -> bool:
    """Whether it is for whoever compiles: a wrong option, ranks that differ, a message that did not come, a guard that
    one process does not ask for."""
    theirs = isinstance(error, GuardAsked) or (isinstance(error, RingError) and not isinstance(error, PlanError))
    return theirs or isinstance(error, OF_OTHERS) or (RAISES and not is_foreseen(error))


def failure_of(error: Exception, where: str) -> Failure:
    """The failure that an error in pass `where` is; logged unless it was foreseen."""
    sentence = f"{where} failed with {type(error).__name__}: {first_line(error)}"
    if is_foreseen(error):
        return Failure(first_line(error), foreseen=True)
    hint = "This is an error of ringopt; the program is compiled without what failed"
    log.warning("%s. %s", sentence, hint, exc_info=error)
    return Failure(sentence)


def agreed(mesh: Mesh, mine: Failure | None) -> Failure | None:
    """That of this rank, or of another where this one has none. Every rank of `mesh` comes here, or none: raises
    RingMismatchError where another calls a graph that it has compiled."""
    if isinstance(mesh, PretendedMesh) or mesh.size == 1:
        return mine
    with unset_fake_temporarily():  # graphs are made while others are traced
        kinds = enter_together(mesh, COMPILES, _kind(mine))
    return mine or _failure_elsewhere(kinds)


def all_want(mesh: Mesh, wanted: bool) -> bool:
    """Whether each rank of `mesh` wants it, all of which come here, or none."""
    return agreed(mesh, None if wanted else Failure("not wanted", foreseen=True)) is None


def _failure_elsewhere(kinds: Sequence[int]) -> Failure | None:
    failed = [rank for rank, kind in enumerate(kinds) if kind]
    if not failed:
        return None
    return Failure(f"a pass failed on ranks {failed}, whose logs say how", foreseen=max(kinds) == 1)


def _kind(failure: Failure | None) -> int:
    return 0 if failure is None else 1 if failure.foreseen else 2
