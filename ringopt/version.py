"""The version of ringopt, and a hash of the engine's sources: part of every key under which compiled code is cached."""

from __future__ import annotations

import hashlib
from pathlib import Path

__version__ = "0.1.0"

# The commands: no compiled graph is made by them.
_NOT_ENGINE = "tools"


def source_hash(package: Path) -> str:
    """Eight hex digits that change with any byte, and any path, of the Python files below `package`."""
    digest = hashlib.blake2b(digest_size=4)
    folders = [package]
    while folders:
        folder = folders.pop()
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():  # passes/ is a link in a checkout, which rglob would not follow
                folders += [entry] if entry.name not in (_NOT_ENGINE, "__pycache__") else []
            elif entry.suffix == ".py":
                digest.update(f"{entry.relative_to(package)}\0".encode() + entry.read_bytes())
    return digest.hexdigest()


def engine_version() -> str:
    """`__version__+hash`, of the sources that this process runs."""
    return f"{__version__}+{source_hash(Path(__file__).parent)}"
