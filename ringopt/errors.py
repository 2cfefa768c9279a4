"""Every error ringopt raises on purpose. Each says what was asked, what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ringopt.output.printable import printable


class RingError(Exception):
    """Base of all errors of ringopt."""

    def __str__(self) -> str:
        return printable(super().__str__())


class OptionError(RingError, ValueError):
    """An option is unknown or has a value that cannot be used."""


class RuleError(RingError, ValueError):
    """A rule for an operator says what cannot be."""


class PlanError(RingError):
    """An exchange plan does something wrong; it is refused before it moves a tensor."""


class RingMismatchError(RingError, RuntimeError):
    """The ranks do not run the same program on the same shapes. Raised on every rank alike."""


class RingCommError(RingError, RuntimeError):
    """A message could not be sent or received: a peer died, hung or left."""


class RingThreadError(RingCommError):
    """Two threads of a process were inside one mesh at a time."""


class RefusedError(RingError):
    """`on_refusal="error"`: an attention site or a graph was left unsharded, or other lengths will run uncompiled."""


class ProgramError(RingError, ValueError):
    """A program (an ExportedProgram, a graph, a .pt2 file) cannot be read, compared or converted."""


class VerificationError(RingError, ArithmeticError):
    """`verify=True`: what was compiled has other numbers than the program it was made from. Raised on every rank
    alike."""


def first_line(error: BaseException) -> str:
    """What an exception says, without what torch adds below."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'explain'?`, or nothing."""
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
