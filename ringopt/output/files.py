"""Files written during a training (traces, dumps, records): an error of the disk never ends it."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

# What may come over any path, however right it is: the disk, or what a user may have of it, is full.
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(file: Path, text: str) -> None:
    """Beside the file first, so that what was there stays as it is where the disk is full. Raises OSError."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, file)
    except OSError:
        with suppress(OSError):  # what is told is why it was not written
            part.unlink(missing_ok=True)
        raise
