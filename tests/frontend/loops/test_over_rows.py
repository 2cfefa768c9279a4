"""Loops over the rows of tensors, as loops over their number."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from ringopt.frontend.loops.over_rows import by_number


def rewritten(head: str) -> str | None:
    """The loop with this head, and what it begins with."""
    (loop,) = ast.parse(f"{head}:\n    use(it)").body
    assert isinstance(loop, ast.For)
    found = by_number(loop)
    if found is None:
        return None
    written = ast.copy_location(ast.For(found.target, found.iter, found.body, found.orelse), found)
    return ast.unparse(written).replace("_ringopt_number", "i")


@pytest.mark.parametrize(
    "head, expected",
    [
        (
            "for x_t in x.unbind(1)",
            """\
            for i in range(x.shape[1]):
                x_t = x[:, i]
                use(it)""",
        ),
        (
            "for x_t, y_t in zip(x.unbind(), torch.unbind(y, dim=-2))",
            """\
            for i in range(x.shape[0] if x.shape[0] == y.shape[-2] else -1):
                x_t = x[i]
                y_t = y[..., i, :]
                use(it)""",
        ),
        (
            "for t, (x_c, y_c) in enumerate(zip(x.split(64, 1), y.split(size, dim=1)))",
            """\
            for t in range(-(-x.shape[1] // 64) if -(-x.shape[1] // 64) == -(-y.shape[1] // size) else -1):
                x_c = x[:, t * 64:min(t * 64 + 64, x.shape[1])]
                y_c = y[:, t * size:min(t * size + size, y.shape[1])]
                use(it)""",
        ),
    ],
)
def test_it_takes_rows_by_their_number(head: str, expected: str) -> None:
    assert rewritten(head) == dedent(expected)


@pytest.mark.parametrize(
    "head",
    [
        "for x_t in f(x).unbind(1)",  # whatever that is, it is made once
        "for x_t in x.unbind(dim)",
        "for x_t in x.unbind(1, 2)",
        "for x_t in x.split([1, 2], 1)",
        "for x_t in x.split(0)",
        "for x_t in x.split()",
        "for x_t in x.chunk(4)",
        "for a, b in x.unbind(1)",
        "for a, b in zip(x.unbind(1), range(9))",
        "for a, b in zip(x.unbind(1), y.unbind(1), z.unbind(1))",
        "for a, b in zip(x.unbind(1), y.unbind(1), strict=True)",
        "for (a, b), c in zip(x.unbind(1), y.unbind(1))",
        "for a in zip(x.unbind(1))",
        "for a, b in enumerate(x.unbind(1), 1)",
        "for a[0] in x.unbind(1)",
        "for a in x",
    ],
)
def test_other_loops_are_left(head: str) -> None:
    assert rewritten(head) is None
