"""Text of a program (names of modules, source lines, nodes of a .pt2 file) as it may be shown.

A terminal obeys escape sequences, whoever wrote them: they clear it, hide lines, make links; and a bidi override shows
a line in another order than it has. Both come out as what one would write in Python source, such as \\x1b. Applied
where text leaves ringopt: errors, logs, what prints itself, pages.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

# C0 without tab and newline, DEL, C1; marks, embeddings, overrides and isolates of the bidi algorithm; line and
# paragraph separators; halves of surrogates, which no encoding takes.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters, and others that a terminal acts on, escaped as in Python."""
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def all_printable(data: Any) -> Any:
    """Of JSON: every text in it."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {all_printable(key): all_printable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [all_printable(value) for value in data]
    return data


class _Printable(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), None
        return True


def logger(name: str) -> logging.Logger:
    """As `logging.getLogger`, for messages that name what is in a program. Where no logging is set up, they go to
    standard error, with who says it."""
    found, root = logging.getLogger(name), logging.getLogger("ringopt")
    if not any(isinstance(one, _Printable) for one in found.filters):
        found.addFilter(_Printable())
    if not any(isinstance(one, Voice) for one in root.handlers):
        root.addHandler(Voice())
    return found


def summary_logger() -> logging.Logger:
    """For lines that are told unasked, one or two a program: without a level of the logger "ringopt" they are heard."""
    found = logger("ringopt.summary")
    if found.level == logging.NOTSET:
        found.addFilter(lambda record: logging.getLogger("ringopt").level <= record.levelno)
        found.setLevel(logging.INFO)
    return found


class Voice(logging.Handler):
    """What Python prints of a logger that nobody has set up is the bare sentence, from every rank alike. Silent where
    another handler has the record: the program's own, or that of TORCH_LOGS."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not heard_elsewhere(record, self):
                sys.stderr.write(f"{spoken(record, rank_here())}\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


def heard_elsewhere(record: logging.LogRecord, but: logging.Handler) -> bool:
    """Whether a handler has the record, other than one."""
    found: logging.Logger | None = logging.getLogger(record.name)
    while found is not None:
        if any(handler is not but and record.levelno >= handler.level for handler in found.handlers):
            return True
        found = found.parent if found.propagate else None
    return False


def spoken(record: logging.LogRecord, rank: int | None) -> str:
    """`ringopt [rank 1] warning: ...`, or `ringopt: ...` for what is no warning."""
    sentence = logging.Formatter().format(record)
    if record.levelno < logging.WARNING:
        return sentence if sentence.startswith("ringopt") else f"ringopt: {sentence}"
    place = "" if rank is None else f" [rank {rank}]"
    return f"ringopt{place} {record.levelname.lower()}: {sentence}"


def rank_here() -> int | None:
    """Of this process among all; None where it is alone. Torch is asked where it was imported already."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    launched = os.environ.get("RANK", "")
    return int(launched) if launched.isdecimal() else None


_logged: set[tuple[str, str]] = set()


def once(log: logging.Logger, level: int, sentence: str) -> None:
    """Logs what this process has not been told yet."""
    if log.isEnabledFor(level) and (log.name, sentence) not in _logged:
        _logged.add((log.name, sentence))
        log.log(level, "%s", sentence)


def forget() -> None:
    """For tests: everything may be said again."""
    _logged.clear()
