"""A GraphDiff for pull requests: a comment in markdown, and annotations of GitHub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ringopt.compare.graph_diff import GraphDiff, nodes_text, values_text
from ringopt.tools.common.diff_rules import number_of
from ringopt.tools.diff_text import ModuleChanges, change_lines, changes_by_module, worst_values

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
            yield from ("| node | relative | max abs | module or line |", "|---|---|---|---|")
        for change in rows:
            where = change.node.module or change.node.source
            assert change.error is not None
            sizes = f"{change.error.relative:.1e} | {change.error.largest:.1e}"
            yield f"| `{cell(change.node.name)}` | {sizes} | {cell(where)} |"
    yield from ("", "| | before | after |", "|---|---|---|")
    for metric, name in (("nodes", "nodes"), ("bytes", "bytes sent by a rank"), ("flops", "FLOPs of products"),
                         ("refused", "attentions that are not sharded")):  # fmt: skip
        one, other = (number_of(diff, metric, side) for side in (0, 1))
        yield f"| {name} | {_shown(one)} | {_shown(other)} |"
    yield ""
    refused = [view for change in diff.sites if (view := change.after) is not None and view.site and view.site.reason]
    for view in refused[:ROWS]:
        yield f"- not sharded: {cell(view.module or view.name)}: {cell(view.site.reason if view.site else '')}"


def _shown(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def cell(text: str) -> str:
    """Text in which markdown and HTML mean nothing, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(text.split()))


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
def github_commands(diff: GraphDiff, broken: Sequence[str]) -> Iterator[str]:
    """Commands of GitHub: an error for every broken rule and for the first value that is off, else a notice."""
    for sentence in broken[:ANNOTATIONS]:
        yield f"::error title=ringopt diff::{escaped(sentence)}"
    first = diff.first_bad
    if first is not None and first.error is not None:
        where = ", ".join(part for part in (first.node.module, first.node.source) if part)
        sentence = f"%{first.node.name} is off by {first.error}" + (f" ({where})" if where else "")
        yield f"::error title=ringopt diff: the first value that is off::{escaped(sentence)}"
    yield f"::notice title=ringopt diff::{escaped(str(diff))}"


def escaped(text: str) -> str:
    """The data of a command of GitHub."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
