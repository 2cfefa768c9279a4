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
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOPS = {"ringopt": "ringopt", "passes": "ringopt.passes", "tools": "ringopt.tools"}
ALIKE = 6  # lines: as many equal ones in two places are a duplicate

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(text: str) -> ast.Module:
    """Once a process: several tests read all files, which takes seconds. Nobody changes a tree."""
    return ast.parse(text)


@dataclass(frozen=True)
class Module:
    """One file by its dotted name."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return parsed(self.path.read_text())

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


# What a function is called with is said elsewhere, so it may take more parameters than MOST.
MOST = 7
SIGNATURES = {
    "ringopt.frontend.fused_layers.attention": "torch._native_multi_head_attention",
    "ringopt.frontend.fused_layers.encoder_layer": "torch._transformer_encoder_layer_fwd",
    "ringopt.frontend.libraries.causal_conv1d.causal_conv1d_fn": "causal_conv1d.causal_conv1d_fn",
    "ringopt.frontend.libraries.mamba_ssm.mamba_split_conv1d_scan_combined": "mamba_ssm's",
    "ringopt.functional.attention": "F.scaled_dot_product_attention, and what a user may say beside it",
    "ringopt.nn.__init__": "nn.MultiheadAttention",
    "ringopt.nn.forward": "F.scaled_dot_product_attention, nn.MultiheadAttention",
    "ringopt.ops.attention.attention_reference": "ringopt::attention",
}
TAKES_SIZES = {"expand", "permute", "reshape", "view"}  # methods of tensors: as many arguments as there are dims


def is_operator(function: Function) -> bool:
    """Whether its signature is the schema of an operator."""
    said = [ast.unparse(each) for each in function.decorator_list]
    operators = ("torch.library.custom_op(", "triton.jit")
    return any(each.startswith(operators) or each.endswith(".register_fake") for each in said)


def many_parameters(known: Mapping[str, Module]) -> list[str]:
    """Functions of more than MOST parameters whose signature is their own."""
    functions = [(f"{name}.{each.name}", each) for name, module in known.items() for each in module.functions()]
    many = [(name, each) for name, each in functions if parameters_of(each) > MOST]
    return [name for name, each in many if not is_operator(each) and name not in SIGNATURES]


def splatted_positions(known: Mapping[str, Module]) -> list[str]:
    """Calls that are given a tuple of positions, `f(x, *how)` behind `how = (a, b, c)` or `f(*(a, b, c))`, where `f` is
    an operator, or is ours and has no `*args`. A value with names says which is which."""
    taking = defaultdict[str, list[bool]](list)
    for module in known.values():
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                taking[node.name].append(node.args.vararg is not None)
            elif isinstance(node, ast.ClassDef):
                made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
                taking[node.name].append(any(each.args.vararg is not None for each in made))
    return [
        f"{name}:{call.lineno}: {ast.unparse(call)}"
        for name, module in known.items()
        for function in module.functions()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and (is_of_operator(call) or is_fixed(call, taking))
        for given in call.args
        if isinstance(given, ast.Starred)
        and (is_display(given.value) or ast.unparse(given.value) in displays(function, module.tree))
    ]


def is_of_operator(call: ast.Call) -> bool:
    """A call of an operator, or of what puts one into a graph: step(operators.scatter.default, ...)."""
    return any(ast.unparse(each).startswith("operators.") for each in (call.func, *call.args[:1]))


def is_fixed(call: ast.Call, taking: Mapping[str, list[bool]]) -> bool:
    """Whether all functions of that name are ours, and take so many arguments and no more."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    return name not in TAKES_SIZES and name in taking and not any(taking[name])


def is_display(value: ast.expr) -> bool:
    return isinstance(value, ast.Tuple) and len(value.elts) > 1


def displays(function: Function, tree: ast.Module) -> set[str]:
    """The names that `function` gives to tuples that are written out, and the attributes of a context of autograd that
    anyone does."""
    own = {name for name in bound(function) if name.isidentifier()}
    return own | {name for name in bound(tree) if name.startswith("ctx.")}


def bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            yield from (ast.unparse(name) for name, value in matched(target, node.value) if is_display(value))


def matched(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Names and values of an assignment, one by one."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for name, one in zip(target.elts, value.elts, strict=True):
            yield from matched(name, one)
    else:
        yield target, value


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
    many = sum(parameters_of(each) > MOST for each in functions)
    yield f"functions of more than {MOST} parameters: {many}, of their own accord: {many_parameters(known)}"
    yield f"calls with a tuple of positions: {len(splatted_positions(known))}"
    yield f"public functions and classes without a docstring: {len(undocumented(known))}"
    yield f"pairs of places that share {ALIKE} lines: {len(duplicates(known))}"
    for document in ("README.md", "ARCHITECTURE.md"):
        yield f"words in {document}: {len((root / document).read_text().split())}"


if __name__ == "__main__":
    print(*figures(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT), sep="\n")
