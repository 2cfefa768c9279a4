"""Files written during a training (traces, dumps, records): an error of the disk never ends it."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

# What may come over any path, however right it is: the disk, or what a user may have of it, is full.
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(file: Path, content: str | bytes) -> None:
    """Beside the file first, so that what was there stays as it is where the disk is full. Raises OSError."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    if file.exists() and not file.is_file():  # a pipe, a device
        file.write_bytes(data)
        return
    file = file.resolve()  # of a link: what it points at
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_bytes(data)
        os.replace(part, file)
    except OSError:
        with suppress(OSError):  # what is told is why it was not written
            part.unlink(missing_ok=True)
        raise
