"""Text of a program (names of modules, source lines, nodes of a .pt2 file) as it may be shown.

A terminal obeys escape sequences, whoever wrote them: they clear it, hide lines, make links; and a bidi override shows
a line in another order than it has. Both come out as what one would write in Python source, such as \\x1b. Applied
where text leaves ringopt: errors, logs, what prints itself, pages.
"""

from __future__ import annotations

import logging
import re
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
    """As `logging.getLogger`, for messages that name what is in a program."""
    found = logging.getLogger(name)
    if not any(isinstance(one, _Printable) for one in found.filters):
        found.addFilter(_Printable())
    return found
