"""Reading .pt2 files, the archives of `torch.export.save`.

torch unpickles some members of an archive, and a pickle can run any code. So every member is looked at first: one that
`torch.load(weights_only=True)` does not take is refused, and so are script objects. That keeps out pickled code. It
does not make a stranger's file harmless: torch hands its size expressions to sympy, and its graph is run. Load what
you trust.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

import ringopt.ops  # noqa: F401  (the operators of converted programs)
from ringopt.errors import ProgramError, first_line

# Where provenance is kept in a file that ringopt wrote.
PROVENANCE = "ringopt.json"


def load(path: str | Path) -> ExportedProgram:
    """The program in `path`. Raises ProgramError: no such file, no .pt2, another version of torch.export, pickled
    code."""
    return load_with_provenance(path)[0]


def load_with_provenance(path: str | Path) -> tuple[ExportedProgram, dict[str, Any] | None]:
    """The program, and what `ringopt convert` noted down when it wrote the file (None: another writer)."""
    if not isinstance(path, (str, os.PathLike)):
        raise ProgramError(f"load takes the path of a .pt2 file; found {type(path).__name__}")
    path = Path(path)
    checked(path)
    extra = {PROVENANCE: ""}
    with told_causes() as causes:
        try:
            program = torch.export.load(path, extra_files=extra)
        except Exception as error:
            cause = root(causes[0] if causes else error)
            raise ProgramError(
                f"torch {torch.__version__} cannot load {path} ({type(cause).__name__}: {first_line(cause)}); import "
                "what defines its outputs and operators, or export it again with this torch"
            ) from None
    return program, json.loads(extra[PROVENANCE]) if extra[PROVENANCE] else None


@contextmanager
def told_causes() -> Iterator[list[BaseException]]:
    """The exceptions that torch.export logs and then hides behind one of its own."""
    found: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        cause = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if cause is not None:
            found.append(cause)
        return cause is None

    logger = logging.getLogger("torch.export")
    logger.addFilter(keep)
    try:
        yield found
    finally:
        logger.removeFilter(keep)


def root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def checked(path: Path) -> dict[str, Any]:
    """What models/model.json holds, of a .pt2 file that can be read without running code. Raises ProgramError."""
    if not path.is_file():
        raise ProgramError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; expected a .pt2 file")
    if not zipfile.is_zipfile(path):
        raise ProgramError(
            f"{path} is not a .pt2 file (no zip archive); write one with torch.export.save(program, path)"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged is None:
                return check_members(path, archive)
    except (zipfile.BadZipFile, zlib.error) as error:
        damaged = first_line(error)
    raise ProgramError(f"{path} is damaged ({damaged}): copy it again, or export it again")


def members_of(archive: zipfile.ZipFile) -> dict[str, str]:
    """The names in an archive by what follows the folder that all of them are in."""
    return {name.partition("/")[2] or name: name for name in archive.namelist()}


def check_members(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    members = members_of(archive)
    if len(members) != len(archive.namelist()) or len({name.partition("/")[0] for name in members.values()}) > 1:
        # Two readers may take two of them, and only one would have been looked at.
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: members of one name, or several folders")
    if "serialized_exported_program.json" in archive.namelist():
        raise ProgramError(
            f"{path} has the format of torch 2.7 and older; export it again with torch {torch.__version__}"
        )
    models = [name for name in members if name.startswith("models/") and name.endswith(".json")]
    if models != ["models/model.json"]:
        found = f"programs {models}" if models else "no program in it"
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: {found}")
    try:
        model: dict[str, Any] = json.loads(archive.read(members["models/model.json"]))
    except ValueError:
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: models/model.json is no JSON") from None
    check_version(path, model)
    for member, name in members.items():
        if member.endswith(".pt"):
            check_pickle(path, member, archive.read(name))
        elif member.endswith("_config.json"):
            folder = member.rpartition("/")[0]
            for entry in json.loads(archive.read(name)).get("config", {}).values():
                file = f"{folder}/{entry['path_name']}"
                if entry["path_name"].startswith(("custom_obj_", "opaque_obj_")):
                    raise ProgramError(f"{path}: {file} is a pickled object, which may run any code; it is not loaded")
                if entry.get("use_pickle"):
                    check_pickle(path, file, archive.read(members[file]))
    return model


def check_version(path: Path, model: dict[str, Any]) -> None:
    from torch._export.serde.schema import SCHEMA_VERSION

    written = model.get("schema_version", {}).get("major")
    if written != SCHEMA_VERSION[0]:
        raise ProgramError(
            f"{path} was written by torch {model.get('torch_version', '?')} in format {written}, and torch "
            f"{torch.__version__} reads format {SCHEMA_VERSION[0]}; export it again with this torch"
        )


def check_pickle(path: Path, member: str, content: bytes) -> None:
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise ProgramError(
            f"{path}: {member} holds pickled objects other than tensors, which may run any code; it is not loaded"
        ) from None
