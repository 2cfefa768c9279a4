"""The profile of a machine: the rates that `ringopt bench --calibrate` measured, in the user's cache folder.

One JSON file for each machine, version of torch and device: rates of other kernels are not reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from functools import lru_cache
from pathlib import Path

import torch

from ringopt.errors import OptionError
from ringopt.hardware.rates import Rates, by_name, cautious

FORMAT = 3


def folder() -> Path:
    """`ringopt` in XDG_CACHE_HOME, or in ~/.cache (XDG Base Directory Specification: a relative path is ignored)."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "ringopt"


def path_of(device: str = "cpu") -> Path:
    """The path of the profile of this machine, device and version of torch."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    machine = hashlib.blake2b(f"{platform.node()} {name}".encode(), digest_size=4).hexdigest()
    return folder() / f"profile-{device}-{machine}-torch{torch.__version__}.json"


def _processor() -> str:
    return f"{platform.machine()} {platform.processor()} {os.cpu_count()}"


def store(rates: Rates, device: str = "cpu") -> Path:
    """Writes the profile atomically, by a rename, and returns its path. Raises OSError."""
    path = path_of(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"format": FORMAT, "rates": rates.to_dict()}, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
    load.cache_clear()
    return path


def here(device: str = "cpu") -> Rates:
    """The rates of this machine: measured; or of a GPU those of its data sheet; or `cautious`. Raises OptionError for a
    file that cannot be read."""
    found = load(path_of(device))
    if found is None and device == "cuda":
        found = by_name(torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory)
    return found if found is not None else cautious()


@lru_cache(maxsize=8)
def load(path: Path) -> Rates | None:
    """The stored rates, None without a file. Cached: the choices of a process stay the same. Raises OptionError."""
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, and this version of ringopt reads {FORMAT}")
        return Rates.of_dict(data["rates"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise OptionError(
            f"the profile {path} cannot be read ({type(problem).__name__}: {problem}); delete it, or measure anew with "
            "`ringopt bench --calibrate`"
        ) from problem
