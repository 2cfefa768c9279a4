"""Reading .pt2 files, the archives of `torch.export.save`: the one door for every command and function.

A file is data until its program is run. torch would unpickle some members of an archive, load compiled libraries out of
it, write its names into Python that it compiles, and evaluate its expressions. So before torch sees any of it, members
are looked at (no pickled code, no libraries, no path that leads out), the JSON is held against the schema of
torch.export (schema.py), and all is kept within bounds; `trusted=True` lifts the bounds, and nothing else.
"""

from __future__ import annotations

import io
import json
import logging
import lzma
import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ringopt.errors import ProgramError, RingError, first_line
from ringopt.frontend.pt2.schema import Odd, check_payload, check_program
from ringopt.torch_compat.export import DTYPES, SCHEMA_VERSION, FileReader
from ringopt.torch_compat.fake_tensors import open_strides_undecided

# Where provenance is kept in a file that ringopt wrote.
PROVENANCE = "ringopt.json"
MODEL = "models/model.json"
TABLES = {
    "data/weights/model_weights_config.json": "data/weights",
    "data/constants/model_constants_config.json": "data/constants",
}
PICKLED = ("custom_obj_", "opaque_obj_")
# Folders of libraries and programs in machine code, which torch loads where it finds them.
COMPILED = ("data/aotinductor/", "data/executorch/", "data/mtia")

# Bounds of a file that nobody has vouched for. torch.export.save compresses nothing.
MOST_TIMES = 100  # larger than the file, once it is unpacked, or as tensors
MOST_ZEROS = 2**30  # bytes of tensors that the file only gives the size of
MOST_JSON = 2**28  # bytes
MOST_LEVELS = 200  # of JSON
# What zipfile raises of a damaged file; RuntimeErrors are of passwords and unknown compressions.
DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError, ValueError)
VOUCH = "; if you know where it is from, say trusted (trusted=True, --trusted)"


def load(path: str | Path, *, trusted: bool = False) -> ExportedProgram:
    """The program in `path`. Raises ProgramError: no such file, no .pt2, another version of torch.export, pickled
    code, code in its names, operators or expressions, or, unless it is `trusted`, more than what bounds allow."""
    return load_with_provenance(path, trusted=trusted)[0]


def load_with_provenance(path: str | Path, *, trusted: bool = False) -> tuple[ExportedProgram, dict[str, Any] | None]:
    """The program, and what `ringopt convert` noted down when it wrote the file (None: another writer)."""
    if not isinstance(path, (str, os.PathLike)):
        raise ProgramError(f"load takes the path of a .pt2 file; found {type(path).__name__}")
    path = Path(path)
    checked(path, trusted)
    check_readers(path)
    extra = {PROVENANCE: ""}
    with logged_causes() as causes, open_strides_undecided():
        try:
            program = torch.export.load(path, extra_files=extra)
        except Exception as error:
            cause = _root_cause(causes[0] if causes else error)
            raise ProgramError(
                f"torch {torch.__version__} cannot load {path} ({type(cause).__name__}: {first_line(cause)}); import "
                "what defines its outputs and operators, or export it again with this torch"
            ) from None
    return program, provenance_of(path, extra[PROVENANCE], trusted)


def provenance_of(path: Path, text: str, trusted: bool) -> dict[str, Any] | None:
    """What `ringopt convert` wrote about a file: versions, options, report. None for a file that ringopt did not write.
    Raises ProgramError if it has another form."""
    if not text:
        return None
    made = json_of(path, PROVENANCE, text.encode(), trusted)
    kinds = {"ringopt": str, "torch": str, "options": dict, "report": dict}
    if not isinstance(made, dict) or not all(isinstance(made.get(key), kind) for key, kind in kinds.items()):
        raise ProgramError(f"{path}: {PROVENANCE} is not what `ringopt convert` writes; convert the program again")
    return made


@contextmanager
def logged_causes() -> Iterator[list[BaseException]]:
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


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def blamed(path: str | Path, what: str) -> Iterator[None]:
    """For what is done with a program out of a file: the file passes all checks and yet makes no sense (a value that
    nobody computes, operands that do not fit)."""
    try:
        yield
    except RingError:
        raise
    except Exception as error:
        raise ProgramError(f"{path} cannot be {what} ({type(error).__name__}: {first_line(error)})") from None


# ---- the archive -----------------------------------------------------------------------------------------------------
def checked(path: Path, trusted: bool = False) -> dict[str, Any]:
    """What models/model.json holds, of a .pt2 file that can be read without running code. Raises ProgramError."""
    if not path.is_file():
        raise ProgramError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; expected a .pt2 file")
    with opened(path, trusted) as archive:
        return check_members(path, archive, trusted)


def opened(path: Path, trusted: bool) -> zipfile.ZipFile:
    """An archive of which every member can be read, and none is looked at yet."""
    try:
        if not zipfile.is_zipfile(path):
            raise ProgramError(
                f"{path} is not a .pt2 file (no zip archive); write one with torch.export.save(program, path)"
            )
        archive = zipfile.ZipFile(path)
        check_names(path, archive)
        if not trusted:
            check_sizes(path, archive)
        damaged = archive.testzip()
    except RingError:
        raise
    except DAMAGED as error:
        damaged = first_line(error)
    if damaged is not None:
        raise ProgramError(f"{path} is damaged ({ascii(damaged)[1:-1][:100]}): copy it again, or export it again")
    return archive


def members_of(archive: zipfile.ZipFile) -> dict[str, str]:
    """The names in an archive by what follows the folder that all of them are in."""
    return {name.partition("/")[2] or name: name for name in archive.namelist()}


def check_names(path: Path, archive: zipfile.ZipFile) -> None:
    """Raises ProgramError for member names that are ambiguous, lead out of the archive, or belong to compiled code,
    and unless there is exactly one program, `models/model.json`."""
    members = members_of(archive)
    folders = {name.partition("/")[0] for name in members.values()}
    # Two readers may take two of them, and only one would have been looked at; torch's does not tell cases apart.
    if len({name.lower() for name in members}) != len(archive.namelist()) or len(folders) > 1:
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: members of one name, or several folders")
    for name in archive.namelist():
        if name.startswith("/") or "\\" in name or {"..", "."} & set(name.split("/")):
            raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: {name[:60]!a} leads out of it")
    if "serialized_exported_program.json" in members:
        raise ProgramError(
            f"{path} has the format of torch 2.7 and older; export it again with torch {torch.__version__}"
        )
    if found := next((name for name in members if name.startswith(COMPILED)), None):
        raise ProgramError(f"{path}: {found[:60]!a} is compiled code, which may do anything; it is not loaded")
    models = [name for name in members if name.startswith("models/")]
    if models != [MODEL]:
        found = f"programs {ascii(models)[:200]}" if models else "no program in it"
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: {found}")


def check_sizes(path: Path, archive: zipfile.ZipFile) -> None:
    """Raises ProgramError for an archive that would take too much memory unpacked (a zip bomb)."""
    unpacked, packed = sum(info.file_size for info in archive.infolist()), path.stat().st_size
    if unpacked > MOST_TIMES * packed:
        raise ProgramError(f"{path} of {packed:,} bytes unpacks to {unpacked:,}, over {MOST_TIMES} times that{VOUCH}")
    for info in archive.infolist():
        if info.filename.endswith(".json") and info.file_size > MOST_JSON:
            raise ProgramError(f"{path}: {info.filename} has {info.file_size:,} bytes, over {MOST_JSON:,}{VOUCH}")


def check_members(path: Path, archive: zipfile.ZipFile, trusted: bool) -> dict[str, Any]:
    """The JSON of the program, once every member is known to be data. Raises ProgramError for what may be code."""
    members = members_of(archive)
    model = json_of(path, MODEL, archive.read(members[MODEL]), trusted)
    check_version(path, model)
    with _refusing_odd(path, MODEL):
        check_program(model)
    for member, name in members.items():
        if member.endswith(".pt"):
            check_pickle(path, member, archive.read(name), trusted)
    for table, folder in TABLES.items():
        if table in members:
            check_table(path, archive, table, folder, trusted)
    assert isinstance(model, dict)
    return model


@contextmanager
def _refusing_odd(path: Path, member: str) -> Iterator[None]:
    try:
        yield
    except Odd as odd:
        raise ProgramError(f"{path}: {member} is refused: {odd}") from None
    except RecursionError:
        raise ProgramError(f"{path}: {member} is nested too deeply") from None


def json_of(path: Path, member: str, content: bytes, trusted: bool) -> Any:
    """The parsed JSON of a member. Raises ProgramError where it is none, or nested too deeply."""
    try:
        value = json.loads(content.decode())  # as torch reads it
    except ValueError as error:
        why = "a number of too many digits" if "digits" in str(error) else "no JSON"
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: {member} is {why}") from None
    except RecursionError:
        raise ProgramError(f"{path}: {member} is nested too deeply") from None
    if not trusted and _nested_deeper(value, MOST_LEVELS):
        raise ProgramError(f"{path}: {member} is nested deeper than {MOST_LEVELS} levels{VOUCH}")
    return value


def _nested_deeper(value: Any, levels: int) -> bool:
    row = [value]
    for _ in range(levels):
        row = [part for inner in row if isinstance(inner, (dict, list)) for part in _containers_in(inner)]
        if not row:
            return False
    return True


def _containers_in(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return (part for part in (value.values() if isinstance(value, dict) else value) if isinstance(part, (dict, list)))


def check_version(path: Path, model: Any) -> None:
    """Raises ProgramError unless the file has the major version of torch.export's schema that this torch reads."""
    version = model.get("schema_version") if isinstance(model, dict) else None
    if not isinstance(version, dict) or type(written := version.get("major")) is not int:
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: {MODEL} has no schema_version")
    if written != SCHEMA_VERSION[0]:
        raise ProgramError(
            f"{path} was written by torch {ascii(model.get('torch_version', '?'))[1:-1][:40]} in format {written}, and "
            f"torch {torch.__version__} reads format {SCHEMA_VERSION[0]}; export it again with this torch"
        )


def check_readers(path: Path) -> None:
    """Python and torch read archives each with a reader of its own: what was looked at has to be what torch loads."""
    with zipfile.ZipFile(path) as archive:
        members = members_of(archive)
        try:
            other = FileReader(str(path))
            same = sorted(other.get_all_records()) == sorted(members) and all(
                other.get_record(member) == archive.read(name)
                for member, name in members.items()
                if not member.startswith(tuple(f"{folder}/" for folder in TABLES.values())) or member in TABLES
            )
        except RuntimeError as error:
            raise ProgramError(f"{path} cannot be read by torch ({first_line(error)}); export it again") from None
    if not same:
        raise ProgramError(f"{path} is not a .pt2 file of torch.export.save: two readers of zip archives read it apart")


# ---- tensors and pickles ---------------------------------------------------------------------------------------------
def check_table(path: Path, archive: zipfile.ZipFile, table: str, folder: str, trusted: bool) -> None:
    """The table of weights, or of constants."""
    members = members_of(archive)
    value = json_of(path, table, archive.read(members[table]), trusted)
    with _refusing_odd(path, table):
        check_payload(value)
    unbacked = 0
    for name, entry in value["config"].items():
        file = f"{folder}/{entry['path_name']}"
        if entry["path_name"].startswith(PICKLED):
            raise ProgramError(f"{path}: {file} is a pickled object, which may run any code; it is not loaded")
        if file not in members:
            raise ProgramError(f"{path} is damaged: {ascii(name)[:60]} should lie in {file}, which is not there")
        if entry["use_pickle"]:
            check_pickle(path, file, archive.read(members[file]), trusted)
        elif entry["tensor_meta"] is None:
            raise ProgramError(f"{path} is damaged: {table} does not say what tensor {ascii(name)[:60]} is")
        else:
            held = archive.getinfo(members[file]).file_size
            size, reach = bytes_of(entry["tensor_meta"])
            if reach < 0 or 0 < held < reach:
                raise ProgramError(f"{path} is damaged: the tensor {name[:60]!a} does not lie within {file}")
            unbacked += size if not held else 0
            if not trusted and (size > MOST_TIMES * held > 0 or unbacked > MOST_ZEROS):
                raise ProgramError(f"{path}: the tensor {name[:60]!a} has {size:,} bytes, {held:,} here{VOUCH}")


def bytes_of(value: dict[str, Any]) -> tuple[int, int]:
    """How many a tensor has, and how far into its storage it reaches: -1, where its strides are none."""
    sizes, strides = ([part.get("as_int", -1) for part in value[key]] for key in ("sizes", "strides"))
    offset, dtype = value["storage_offset"].get("as_int", -1), DTYPES.get(value["dtype"])
    if len(sizes) != len(strides) or min((*sizes, *strides, offset)) < 0 or dtype is None:
        return 0, -1
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    size = math.prod(sizes) * dtype.itemsize
    return size, (offset + last + 1) * dtype.itemsize if size else 0


def check_pickle(path: Path, member: str, content: bytes, trusted: bool) -> None:
    """Raises ProgramError for a pickled member that holds anything but tensors (`torch.load(weights_only=True)`), or
    that unpacks to far more bytes than it has."""
    if not content:
        return
    try:
        if not trusted and zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as inner:
                unpacked = sum(info.file_size for info in inner.infolist())
            if unpacked > MOST_TIMES * len(content):
                raise ProgramError(f"{path}: {member} unpacks to {unpacked:,} bytes{VOUCH}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(io.BytesIO(content), weights_only=True)
    except RingError:
        raise
    except Exception:  # of a damaged pickle, whatever its reader happens on
        raise ProgramError(
            f"{path}: {member} holds pickled objects other than tensors, which may run any code; it is not loaded"
        ) from None
