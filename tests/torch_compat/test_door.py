"""Private names of torch are used behind one door, ringopt/torch_compat, and nowhere else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import parsed

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "ringopt/torch_compat"
PACKAGES = {"torch", "functorch", "torchgen"}
# Documented by the standard library: of named tuples, whose methods have to differ from the names of fields, and the
# end of a fork.
STANDARD = {"_asdict", "_field_defaults", "_fields", "_make", "_replace", "_exit"}
# Settings that torch documents, which an example spells as its readers have to.
DOCUMENTED = {"torch._dynamo", "torch._dynamo.config.optimize_ddp"}
# By which Lightning says that a module is compiled, diffusers that a model can be sharded, and a factory of
# transformers which models it makes.
OF_OTHERS = {"_compiler_ctx", "_cp_plan", "_model_mapping"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "methodcaller", "attrgetter"}
PATH = re.compile(r"torch(\.\w+)*\._[\w.]*")


def is_private(name: str) -> bool:
    """Of one part of a path. What is experimental changes as what is private."""
    return (name.startswith("_") and not name.endswith("__") and name != "_") or name == "experimental"


def has_private(path: str) -> bool:
    return any(map(is_private, path.split(".")))


def sources() -> list[Path]:
    found = [path for top in ("ringopt", "passes", "tools", "examples") for path in (ROOT / top).rglob("*.py")]
    return sorted(path for path in found if path.parent.resolve() == path.parent and DOOR not in path.parents)


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a file of ours gives to what it makes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and called(node) == "__setattr__" and len(node.args) == 3:
            yield str(getattr(node.args[1], "value", ""))


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def names_of_torch(tree: ast.AST) -> set[str]:
    """What a file calls modules and names of torch, and names of modules made of these: `aten = torch.ops.aten`."""
    found = set(PACKAGES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or "torch" for alias in node.names if alias.name.split(".")[0] in PACKAGES}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and root(node.value) in found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def read_by_door() -> set[str]:
    """Names of attributes that stand for something of torch wherever they are read."""
    trees = [parsed(path.read_text()) for path in DOOR.glob("*.py")]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def private_uses(tree: ast.AST, own: set[str], of_torch: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name. `own`: private names that are ours; `of_torch`: those that are torch's even so."""
    aliases, told = names_of_torch(tree), docstrings(tree)

    def foreign(name: str) -> bool:
        return is_private(name) and name not in STANDARD | OF_OTHERS and (name in of_torch or name not in own)

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, path) for path in paths if has_private(path))
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.split(".")[0] in PACKAGES]
            yield from ((node.lineno, path) for path in paths if has_private(path))
        elif isinstance(node, ast.Attribute) and not is_own(node.value):
            if is_private(node.attr) and (root(node.value) in aliases or foreign(node.attr)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and called(node) in BY_NAME and not (node.args and is_own(node.args[0])):
            names = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            yield from ((node.lineno, ast.unparse(node)) for name in names if foreign(name))
        elif isinstance(node, ast.Constant) and id(node) not in told and PATH.fullmatch(str(node.value)):
            yield node.lineno, str(node.value)


def docstrings(tree: ast.AST) -> set[int]:
    expressions = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(value) for value in expressions if isinstance(value, ast.Constant)}


def test_nothing_private_of_torch_is_used_beside_the_door() -> None:
    trees = {path: parsed(path.read_text()) for path in sources()}
    own, of_torch = {name for tree in trees.values() for name in defined(tree)}, read_by_door()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in private_uses(tree, own, of_torch)
        if not (path.is_relative_to(ROOT / "examples") and name in DOCUMENTED)
    ]
    assert not found, "give these a name in ringopt/torch_compat, and a test there:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "from torch._guards import tracing",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
        "from torch.autograd import _disable_profiler_legacy",
        "import torch._dynamo",
        "import torch._functorch.config as functorch",
        "import torch\nx = torch.autograd.grad_mode._enter_inference_mode",
        "import torch.nn.functional as F\nF._canonical_mask",
        "from torch.nn.modules import transformer\ntransformer._detect_is_causal_mask",
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(f)",
        "x.untyped_storage()._cdata",
        "node.target._schema.name",
        "self._whole._version",
        "run._boxed_call = True",
        "getattr(node.target, '_schema', None)",
        "hasattr(x, '_dynamo_dynamic_indices')",
        "import_module('torch._inductor.config')",
        "f'torch._functorch.predispatch.{name}'",
        "sys._getframe()",
    ],
)
def test_a_private_use_is_found(text: str) -> None:
    own = {"_post", "_schema", "_version", "_kept"}
    assert list(private_uses(ast.parse(text), own, read_by_door()))


@pytest.mark.parametrize(
    "text",
    [
        "from torch.fx import Graph",
        "from ringopt.torch_compat.schema import schema_of",
        "self._version = self._schema = 0",
        "mesh._post(x)",
        "config._replace(early='')._asdict()",
        "'''torch._dynamo.config is named in a sentence'''",
        "print('set torch._dynamo.config.optimize_ddp = False')",
        "node.__class__.__name__, torch.__version__",
        "for _ in x: pass",
    ],
)
def test_what_is_public_or_ours_is_not_found(text: str) -> None:
    assert not list(private_uses(ast.parse(text), {"_post"}, read_by_door()))


def test_every_name_of_the_door_has_a_test() -> None:
    tested = set[str]()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            tested |= {getattr(node, "attr", ""), getattr(node, "id", "")}
    handed_on = {path.stem: exported(path) for path in DOOR.glob("*.py") if path.stem != "__init__"}
    assert all(handed_on.values())
    missing = [f"{file}.{name}" for file, names in handed_on.items() for name in names if name not in tested]
    assert not missing


def exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


HEAVY = {
    "aot_autograd", "dynamo", "dynamo_attributes", "dynamo_branches", "dynamo_bytecode", "dynamo_calls",
    "dynamo_frames", "dynamo_lists", "dynamo_logging", "dynamo_memory", "dynamo_random", "dynamo_ranges",
    "dynamo_recurrent", "dynamo_rows", "dynamo_views", "export", "inductor_passes", "torch_ring",
}  # fmt: skip


def test_light_modules_bring_no_compiler_along() -> None:
    light = sorted({path.stem for path in DOOR.glob("*.py")} - HEAVY - {"__init__"})
    script = f"import sys, {', '.join(f'ringopt.torch_compat.{name}' for name in light)}\n"
    script += "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr
