"""Loops over the rows of tensors as loops over their number:

    for q_t, k_c in zip(q.unbind(1), k.split(64, 1)):      for i in range(q.shape[1]):
                                                     ->        q_t = q[:, i]
                                                               k_c = k[:, i * 64 : min(i * 64 + 64, k.shape[1])]

With `enumerate` the number has a name of the program. Dynamo would take the tensors apart, row by row, before it comes
to the loop.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ringopt.torch_compat.dynamo_rows import TAKE_APART

NUMBER = "_ringopt_number"


class OverRows(ast.For):
    """A loop over a range that was one over rows; `first` is the call by which the first of its tensors is taken
    apart."""

    first: ast.Call


@dataclass(frozen=True)
class Rows:
    """What a loop takes of the tensor of a name along a dim: one row in each turn, or `size` of them."""

    tensor: str
    dim: int
    size: str = ""

    @property
    def count(self) -> str:
        """How many turns there are."""
        length = f"{self.tensor}.shape[{self.dim}]"
        return f"-(-{length} // {self.size})" if self.size else length

    def of_turn(self, number: str) -> str:
        """What a turn takes."""
        start = f"{number} * {self.size}"
        length = f"{self.tensor}.shape[{self.dim}]"
        taken = f"{start} : min({start} + {self.size}, {length})" if self.size else number
        front, behind = ([":"] * self.dim, []) if self.dim >= 0 else (["..."], [":"] * (-1 - self.dim))
        return f"{self.tensor}[{', '.join([*front, taken, *behind])}]"


def by_number(loop: ast.For) -> OverRows | None:
    """None of a loop over something else."""
    over, target, number = loop.iter, loop.target, NUMBER
    if is_call(over, "enumerate", 1) and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        counted, target = target.elts
        if not isinstance(counted, ast.Name):
            return None
        over, number = over.args[0], counted.id  # type: ignore[attr-defined]
    each, targets = [over], [target]
    if is_call(over, "zip") and isinstance(target, ast.Tuple):
        each, targets = over.args, target.elts  # type: ignore[attr-defined]
    rows = [rows_of(call) for call in each]
    found = [(one, name.id) for one, name in zip(rows, targets, strict=False) if one and isinstance(name, ast.Name)]
    if not found or not len(found) == len(each) == len(targets):
        return None
    counts = [one.count for one, _ in found]
    alike = " and ".join(f"{counts[0]} == {count}" for count in counts[1:])
    many = f"{counts[0]} if {alike} else -1" if alike else counts[0]
    taken = [f"    {name} = {one.of_turn(number)}" for one, name in found]
    made = ast.parse("\n".join([f"for {number} in range({many}):", *taken])).body[0]
    assert isinstance(made, ast.For)
    for node in (found for part in (made.target, made.iter, *made.body) for found in ast.walk(part)):
        ast.copy_location(node, loop.iter)
    again = OverRows(made.target, made.iter, [*made.body, *loop.body], loop.orelse)
    again.first = each[0]  # type: ignore[assignment]
    return ast.copy_location(again, loop)


def rows_of(call: ast.expr) -> Rows | None:
    """Of `x.unbind(1)`, `torch.unbind(x, 1)` and `x.split(64, 1)`."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in TAKE_APART:
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    args = [call.func.value, *call.args]
    if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch":
        args = args[1:]
    asked = ["input", "dim"] if call.func.attr == "unbind" else ["input", "split_size", "dim"]
    if len(args) > len(asked) or not named.keys() <= {*asked[len(args) :]}:
        return None
    found: dict[str | None, ast.expr] = {**dict(zip(asked, args, strict=False)), **named}
    tensor, size, dim = found.get("input"), found.get("split_size"), number_of(found.get("dim", ast.Constant(0)))
    if not isinstance(tensor, ast.Name) or dim is None or (size is None) == ("split_size" in asked):
        return None
    if size is not None and not isinstance(size, ast.Name) and not (number_of(size) or 0) > 0:
        return None
    return Rows(tensor.id, dim, ast.unparse(size) if size is not None else "")


def number_of(node: ast.expr) -> int | None:
    """A whole number that is written there."""
    try:
        found = ast.literal_eval(node)
    except ValueError:
        return None
    return found if type(found) is int else None


def is_call(node: ast.expr, name: str, args: int | None = None) -> bool:
    """Of one of Python's own functions, with nothing by name."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
        return False
    return node.func.id == name and (args is None or len(node.args) == args)
