"""A GraphDiff for pull requests: a comment in markdown, and annotations of GitHub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from ringopt.compare.graph_diff import GraphDiff, NodeView, nodes_text, values_text
from ringopt.tools.common.diff_rules import number_of
from ringopt.tools.diff_text import ModuleChanges, change_lines, changes_by_module, error_cells, first_off, worst_values

LONGEST = 60_000  # characters; a comment of GitHub takes 65,536
ROWS, ANNOTATIONS = 12, 10  # of which GitHub shows ten a step


# ---- a comment -------------------------------------------------------------------------------------------------------
def markdown(diff: GraphDiff, before: str, after: str, broken: Sequence[str] = ()) -> str:
    """The most important first: rules that are broken, values that are off, numbers, refusals, then nodes by module, as
    many as go into a comment."""
    head = "\n".join([f"### {cell(before)} → {cell(after)}", "", cell(nodes_text(diff)), "", *_head(diff, broken)])
    parts, length, blocks = [head[: LONGEST // 2]], len(head), _changed(diff)
    for number, block in enumerate(blocks):
        text = fenced(block)
        if length + len(text) + number > LONGEST - 200:
            parts.append(f"\n… and {len(blocks) - number:,} more modules that differ")
            break
        parts.append(text)
        length += len(text)
    return "\n".join(parts) + "\n"


def _head(diff: GraphDiff, broken: Sequence[str]) -> Iterator[str]:
    for sentence in broken:
        yield f"- ❌ {cell(sentence)}"
    if diff.compared:
        yield from ("", f"**{cell(values_text(diff))}**", "")
        rows = worst_values(diff, ROWS)
        if rows:
            yield from ("| node | relative | max abs | gradient | module or line |", "|---|---|---|---|---|")
        for change in rows:
            where = change.node.module or change.node.source
            sizes = " | ".join((*error_cells(change.error), error_cells(change.gradient)[0]))
            yield f"| {code(change.node.name)} | {sizes} | {cell(where)} |"
    yield from ("", "| | before | after |", "|---|---|---|")
    for metric, name in (("nodes", "nodes"), ("bytes", "bytes sent by a rank"), ("flops", "FLOPs of products"),
                         ("refused", "attentions that are not sharded")):  # fmt: skip
        one, other = (number_of(diff, metric, side) for side in (0, 1))
        yield f"| {name} | {_shown(one)} | {_shown(other)} |"
    yield ""
    for view in refused_views(diff)[:ROWS]:
        yield f"- not sharded: {cell(view.module or view.name)}: {cell(view.site.reason if view.site else '')}"


def refused_views(diff: GraphDiff) -> list[NodeView]:
    """Attentions of the second program that are not sharded, and say why."""
    return [view for change in diff.sites if (view := change.after) is not None and view.site and view.site.reason]


def _shown(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def cell(text: str) -> str:
    """Text in which markdown and HTML mean nothing, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Text in a cell as it is: between backticks a backslash is one, but for `|`."""
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _changed(diff: GraphDiff) -> list[ModuleChanges]:
    kinds = ("resized", "same")
    blocks = changes_by_module(diff, False)
    return [block for block in blocks if any(change.kind not in kinds for change in block.changes)]


def fenced(block: ModuleChanges) -> str:
    """The changes of a module and of those like it."""
    like = f" (and {len(block.like)} like it)" if block.like else ""
    changed = (change for change in block.changes if change.kind not in ("resized", "same"))
    lines = [line.plain[2:] for change in changed for line in change_lines(change)]
    body = "\n".join(lines).replace("```", "'''")
    return f"\n<details><summary>{cell(block.module)}{like}</summary>\n\n```diff\n{body}\n```\n</details>"


# ---- annotations -----------------------------------------------------------------------------------------------------
def github_commands(diff: GraphDiff, broken: Sequence[str], root: Path | None = None) -> Iterator[str]:
    """Commands of GitHub: an error for every broken rule and for the first value that is off, a warning for attention
    that is refused, and a notice. They stand at their lines of files in `root`, the repository that is checked."""
    root = root or Path(os.environ.get("GITHUB_WORKSPACE", "."))
    for sentence in broken[:ANNOTATIONS]:
        yield f"::error title=ringopt diff::{escaped(sentence)}"
    first = first_off(diff)
    if first is not None:
        node, what, error = first
        where = ", ".join(part for part in (node.module, node.source) if part)
        sentence = f"%{node.name} is off by {error}" + (f" ({where})" if where else "")
        yield f"::error {placed(node.path, root)}title=ringopt diff: the first {what} that is off::{escaped(sentence)}"
    for view in refused_views(diff)[:ANNOTATIONS]:
        why = f"{view.module or view.name}: {view.site.reason if view.site else ''}"
        yield f"::warning {placed(view.path, root)}title=ringopt diff: not sharded::{escaped(why)}"
    yield f"::notice title=ringopt diff::{escaped(str(diff))}"


def placed(path: str, root: Path) -> str:
    """`file=src/model.py,line=12,` of the file in `root` that the end of `path` names; "" where there is none: the
    program may have been exported elsewhere."""
    file, _, line = path.rpartition(":")
    parts = PurePath(file).parts
    ends = (PurePath(*parts[at:]) for at in range(1 if PurePath(file).is_absolute() else 0, len(parts)))
    found = next((end for end in ends if (root / end).is_file() and ".." not in end.parts), None)
    if found is None or not line.isdecimal():
        return ""
    name = escaped(found.as_posix()).replace(":", "%3A").replace(",", "%2C")
    return f"file={name},line={line},"


def escaped(text: str) -> str:
    """The data of a command of GitHub."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
