"""The structure of the code, read from its syntax trees. `python -m tests.structure [CHECKOUT]` prints the figures.

Imports inside functions and for annotations count like any other: whoever reads the code follows them too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = {"ringopt": "ringopt", "passes": "ringopt.passes", "tools": "ringopt.tools"}
ALIKE = 6  # lines: as many equal ones in two places are a duplicate

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file by its dotted name."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def folder(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def modules(root: Path = ROOT) -> dict[str, Module]:
    """Every module of the package, by name; passes/ and tools/ under the names that they are installed by."""
    found = {}
    for top, package in TOPS.items():
        for path in sorted((root / top).rglob("*.py")):
            if path.parent.resolve() == path.parent:  # not through a link
                parts = path.relative_to(root / top).with_suffix("").parts
                name = ".".join([package, *parts]).removesuffix(".__init__")
                found[name] = Module(name, path)
    return found


# ---- imports ---------------------------------------------------------------------------------------------------------
def imported(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it or None) of every import in the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((node.module, alias.name) for alias in node.names)


def import_graph(known: Mapping[str, Module]) -> dict[str, set[str]]:
    graph = {}
    for name, module in known.items():
        targets = ((f"{at}.{taken}", at) for at, taken in imported(module.tree))
        graph[name] = {inner if inner in known else at for inner, at in targets} & known.keys() - {name}
    return graph


def folder_graph(known: Mapping[str, Module]) -> dict[str, set[str]]:
    """Which folder imports from which. A file of the package's root is a room of its own: it is what a user names."""
    room = {name: module.folder if module.folder != "ringopt" else name for name, module in known.items()}
    graph = defaultdict[str, set[str]](set)
    for name, targets in import_graph(known).items():
        graph[room[name]] |= {room[target] for target in targets} - {room[name]}
    return dict(graph)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan, 1972)."""
    index, low, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def side_effect_imports(module: Module) -> list[str]:
    """Modules of ringopt that are imported and of which the text uses no name."""
    used = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    used |= {text.partition(".")[0] for text in annotations(module.tree)}
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            at = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                name = f"{at}.{alias.name}" if at else alias.name
                bound = alias.asname or alias.name.partition(".")[0]
                if name.startswith("ringopt.") and (bound not in used or (at is None and bound == "ringopt")):
                    found.append(name)
    return found


def annotations(tree: ast.Module) -> Iterator[str]:
    """Names in annotations that are texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\b[A-Za-z_]\w*", node.value)


# ---- sizes -----------------------------------------------------------------------------------------------------------
def files_in_folders(known: Mapping[str, Module]) -> Counter[str]:
    return Counter(module.folder for module in known.values() if module.path.name != "__init__.py")


def lines_of(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters_of(function: Function) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def undocumented(known: Mapping[str, Module]) -> list[str]:
    """Public functions and classes at the top of their file without a docstring."""
    return [
        f"{name}.{node.name}"
        for name, module in known.items()
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]


def read_from_outside(known: Mapping[str, Module]) -> set[tuple[str, str]]:
    """(module, name) of what another module imports, or reads as an attribute of a module that it imports."""
    found = set[tuple[str, str]]()
    for module in known.values():
        taken = [(at, name) for at, name in imported(module.tree) if name is not None]
        found.update(taken)
        names = {name: f"{at}.{name}" for at, name in taken if f"{at}.{name}" in known}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                found.add((names[node.value.id], node.attr))
    return found


def homonyms(known: Mapping[str, Module]) -> dict[str, list[str]]:
    """Functions and classes of one name, with the modules that define one and others read it from."""
    places, read = defaultdict[str, list[str]](list), read_from_outside(known)
    for name, module in known.items():
        for node in module.tree.body:
            if isinstance(node, Function | ast.ClassDef) and (name, node.name) in read:
                places[node.name].append(name)
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def duplicates(known: Mapping[str, Module]) -> set[tuple[str, str]]:
    """Pairs of places that share ALIKE lines of code, imports and docstrings aside; each run of lines counts once."""
    places = defaultdict[tuple[str, ...], list[tuple[str, int]]](list)
    for name, module in known.items():
        skipped = {
            line
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        text = [(i, line.strip()) for i, line in enumerate(module.path.read_text().splitlines(), 1)]
        code = [(i, line) for i, line in text if line and i not in skipped and not line.startswith("#")]
        for at in range(len(code) - ALIKE + 1):
            window = code[at : at + ALIKE]
            if sum(len(line) for _, line in window) > 100:  # not brackets alone
                places[tuple(line for _, line in window)].append((name, window[0][0]))
    pairs = {pair for found in places.values() for pair in combinations(sorted(found), 2)}
    begins = {((a, i), (b, j)) for (a, i), (b, j) in pairs if ((a, i - 1), (b, j - 1)) not in pairs}
    return {(f"{a}:{i}", f"{b}:{j}") for (a, i), (b, j) in begins}


def figures(root: Path) -> Iterator[str]:
    known = modules(root)
    graph, rooms = import_graph(known), folder_graph(known)
    functions = [function for module in known.values() for function in module.functions()]
    yield f"modules: {len(known)}, imports: {sum(map(len, graph.values()))}"
    yield f"arrows between folders: {sum(map(len, rooms.values()))}"
    yield f"circles of modules: {circles(graph)}"
    yield f"circles of folders: {circles(rooms)}"
    yield f"most files in a folder: {files_in_folders(known).most_common(8)}"
    yield f"modules imported for a side effect: {sum(bool(side_effect_imports(module)) for module in known.values())}"
    yield f"functions: {len(functions)}, over 60 lines: {sum(lines_of(each) > 60 for each in functions)}"
    yield f"functions of more than 7 parameters: {sum(parameters_of(each) > 7 for each in functions)}"
    yield f"public functions and classes without a docstring: {len(undocumented(known))}"
    yield f"pairs of places that share {ALIKE} lines: {len(duplicates(known))}"
    for document in ("README.md", "ARCHITECTURE.md"):
        yield f"words in {document}: {len((root / document).read_text().split())}"


if __name__ == "__main__":
    print(*figures(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT), sep="\n")
