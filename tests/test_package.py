"""The package: mapping and links agree, the wheel holds everything, and importing it is cheap."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ringopt
from ringopt.version import source_hash
from tests.structure import imported, modules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MOUNTED = {"ringopt.passes": "passes", "ringopt.tools": "tools"}


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints, started outside the checkout."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd="/", env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(("package", "folder"), MOUNTED.items())
def test_folders_at_the_top_are_linked_into_the_package(package: str, folder: str) -> None:
    link = ROOT / package.replace(".", "/")
    assert link.is_symlink(), f"{link} must be a link to {folder}/: the checkout would lack what the wheel has"
    assert os.readlink(link) == f"../{folder}"


def test_every_folder_with_code_is_a_listed_package() -> None:
    inits = [path for top in ("ringopt", "passes", "tools") for path in (ROOT / top).rglob("__init__.py")]
    mounts = {path: name for name, path in MOUNTED.items()}
    found = set()
    for init in inits:
        top, *rest = init.parent.relative_to(ROOT).parts
        found.add(".".join([mounts.get(top, top), *rest]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_any_byte_of_any_folder_changes_the_key_of_compiled_code(tmp_path: Path) -> None:
    """Compiled code is cached by the text of a graph, in which operators are names: what they do is not in it."""
    package = tmp_path / "ringopt"
    shutil.copytree(ROOT / "ringopt", package, ignore=shutil.ignore_patterns("__pycache__"))
    keys = {source_hash(package)}
    assert keys == {source_hash(ROOT / "ringopt")}
    folders = {path.parent for path in package.rglob("*.py") if "tools" not in path.relative_to(package).parts}
    for folder in sorted(folders):
        file = max(folder.glob("*.py"))
        file.write_bytes(file.read_bytes() + b"\n")
        keys.add(source_hash(package))
    assert len(keys) == 1 + len(folders)


# Of extras, torch and jinja2.
OF_OTHERS = {"matplotlib", "accelerate", "lightning", "transformers", "coverage", "pytest", "triton", "markupsafe"}


def test_what_is_imported_is_declared() -> None:
    """Torch installs without numpy, and tensors reach it by `.numpy()` without an import: a bare wheel in an empty
    environment failed on its first message. (`.ci/bare` installs one there and runs it on two ranks.)"""
    found = {name.partition(".")[0] for module in modules().values() for name, _ in imported(module.tree)}
    if any(".numpy()" in module.path.read_text() for module in modules().values()):
        found.add("numpy")
    declared = {re.split(r"\W", one)[0] for one in PROJECT["project"]["dependencies"]}
    assert found - set(sys.stdlib_module_names) - {"ringopt", "tools"} - OF_OTHERS == declared


def test_import_is_light() -> None:
    """No torch, and nothing else that is slow to load; so --help and list_backends() are quick."""
    assert python("import sys, ringopt; print(sorted({'torch', 'sympy', 'rich', 'numpy'} & set(sys.modules)))") == "[]"


OPERATORS = sorted(path.stem for path in (ROOT / "ringopt" / "ops").glob("*.py") if "custom_op(" in path.read_text())
# What is run in copies of one interpreter that has torch, and nothing of ringopt yet; and what it prints.
FRESH = {
    "importing the operators defines all of them, or a file that names them could not be loaded": (
        f"import sys, ringopt.ops; print([n for n in {OPERATORS} if 'ringopt.ops.' + n not in sys.modules])",
        "[]",
    ),
    "an operator without a row in the table of traits does not import": (
        "import torch; library = torch.library.Library('ringopt', 'FRAGMENT')\n"
        "library.define('scater(Tensor x) -> Tensor')\n"
        "try: import ringopt.ops\n"
        "except TypeError as error: print(str(error)[:76])",
        "operators of ringopt without a row in ringopt/ops/traits.py: ['scater']; row",
    ),
    "no public name needs a process group": (
        "import ringopt, torch.distributed as dist; [getattr(ringopt, n) for n in ringopt.__all__]\n"
        "print(dist.is_initialized())",
        "False",
    ),
    "the backend is found without importing ringopt": (
        "import sys, torch._dynamo as dynamo; print('ring' in dynamo.list_backends(), 'ringopt' in sys.modules)\n"
        "from torch._dynamo.backends.registry import lookup_backend; print(lookup_backend('ring').__name__)",
        "True False\nring",
    ),
}


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def fresh(unpacked: Path) -> list[str]:
    """What each of FRESH prints, and last the files of a wheel that is run."""
    of_wheel = (
        f"sys.path[:] = [{str(unpacked)!r}, *(path for path in sys.path if path != {str(ROOT)!r})]\n"
        "import ringopt, ringopt.passes, ringopt.tools.cli as cli; print(ringopt.__file__, cli.__file__)"
    )
    code = (
        "import os, sys, torch._dynamo\n"
        f"for code in {[*(code for code, _ in FRESH.values()), of_wheel]!r}:\n"
        "    sys.stdout.flush()\n"
        "    if os.fork() == 0:\n"
        "        exec(code)\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    print('---')"
    )
    return python(code, PYTHONPATH=str(ROOT)).split("---")


@pytest.mark.parametrize("fact", FRESH)
def test_a_fresh_interpreter(fact: str, fresh: list[str]) -> None:
    assert fresh[list(FRESH).index(fact)].strip() == FRESH[fact][1]


@pytest.mark.parametrize("name", ringopt.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(ringopt, name) is not None
    assert name in dir(ringopt)


@pytest.mark.parametrize("name", sorted(set(ringopt.__all__) - {"errors", "nn"}))
def test_no_public_name_is_a_module_too(name: str) -> None:
    """Importing a module sets it as an attribute of its package, where the function of the same name stood."""
    assert importlib.util.find_spec(f"ringopt.{name}") is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"module 'ringopt' has no attribute 'atention'; it has .*attention"):
        _ = ringopt.atention  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this checkout, so that no build folder is left behind in it; named as a clone is."""
    source = tmp_path_factory.mktemp("sources") / "ringopt"
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for room in ("ringopt", "passes", "tools"):
        shutil.copytree(ROOT / room, source / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return source


def built(source: Path, folder: Path, how: str) -> Path:
    """The wheel that setuptools makes in `folder`: `how` is "wheel" or "editable"."""
    code = f"from setuptools.build_meta import build_{how}; print(build_{how}({str(folder)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(copy, tmp_path_factory.mktemp("wheel"), "wheel")


def test_a_clone_beside_a_script_does_not_hide_the_editable_package(copy: Path, tmp_path: Path) -> None:
    """The folder of a script comes first in sys.path: there the clone is a package without a file, which one further
    down goes before, and an import hook does not."""
    zipfile.ZipFile(built(copy, tmp_path, "editable")).extractall(tmp_path / "site")
    (copy.parent / "script.py").write_text(
        "import site, sys, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"  # an install of another checkout is none here
        "sys.path = [x for x in sys.path if pathlib.Path(x) == here or not pathlib.Path(x, 'ringopt').exists()]\n"
        f"site.addsitedir({str(tmp_path / 'site')!r})\n"
        "import ringopt, ringopt.tools.cli as cli; print(ringopt.__file__, cli.__name__)\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, copy.parent / "script.py"]
    ran = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [str(copy / "ringopt" / "__init__.py"), "ringopt.tools.cli"], ran.stderr


def test_the_wheel_holds_every_module_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    modules = {path.relative_to(ROOT) for path in (ROOT / "ringopt").rglob("*.py") if "__pycache__" not in path.parts}
    for package, folder in MOUNTED.items():
        mount = Path(package.replace(".", "/"))
        modules |= {mount / path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")}
    beside = [*(ROOT / "ringopt/reporting/web").iterdir(), *(ROOT / "ringopt" / "compare").glob("*.schema.json")]
    data = ["ringopt/py.typed", *(str(path.relative_to(ROOT)) for path in beside)]
    assert sorted(names) == sorted([*map(str, modules), *data])


def test_the_wheel_declares_what_the_project_does(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [info] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = archive.read(f"{info}/METADATA").decode()
    assert dict(entry_points["torch_dynamo_backends"]) == {"ring": "ringopt.backend:ring"}
    assert dict(entry_points["console_scripts"]) == {"ringopt": "ringopt.tools.cli:main"}
    assert f"\nVersion: {ringopt.__version__}\n" in metadata


def test_the_wheel_runs_outside_the_checkout(fresh: list[str], unpacked: Path) -> None:
    files = fresh[len(FRESH)].split()
    assert len(files) == 2 and all(Path(file).is_relative_to(unpacked) for file in files)
