"""The structure of the code, read from its syntax trees: imports, sizes, duplicates. `python -m tests.structure`.

Imports inside functions and for annotations count like any other: whoever reads the code follows them too.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = {"ringopt": "ringopt", "passes": "ringopt.passes", "tools": "ringopt.tools"}


@dataclass(frozen=True)
class Module:
    """One file: its dotted `name`, and what it imports, as dotted names of modules."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def folder(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules() -> dict[str, Module]:
    """Every module of the package, by name; passes/ and tools/ under the names that they are installed by."""
    found = {}
    for top, package in TOPS.items():
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if path.parent.resolve() == path.parent:
                name = ".".join([package, *parts]).removesuffix(".__init__")
                found[name] = Module(name, path)
    return found


def imports(module: Module, known: Mapping[str, Module]) -> set[str]:
    """The modules among `known` that `module` imports anywhere in its text."""
    found = set[str]()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in inner}
    return found & known.keys() - {module.name}


def import_graph(known: Mapping[str, Module]) -> dict[str, set[str]]:
    return {name: imports(module, known) for name, module in known.items()}


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


def side_effect_imports(module: Module) -> Iterator[str]:
    """Imports of modules of ringopt of which the text uses no name."""
    used = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("ringopt.") and (alias.asname or "ringopt") not in used:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringopt"):
            for alias in node.names:
                if (alias.asname or alias.name) not in used:
                    yield f"{node.module}.{alias.name}"


if __name__ == "__main__":
    known = modules()
    graph, rooms = import_graph(known), folder_graph(known)
    arrows = [sum(map(len, of.values())) for of in (graph, rooms)]
    print(f"{len(known)} modules, {arrows[0]} imports, {arrows[1]} arrows between folders")
    for what, found in (("modules", circles(graph)), ("folders", circles(rooms))):
        print(f"circles of {what}: {found}")
    for name, module in known.items():
        if effects := list(side_effect_imports(module)):
            print(f"imports for side effects: {name}: {', '.join(effects)}")
