"""Words for a mask, for the report: "causal & padding(attention_mask) & bias(learned: relative_attention_bias.weight)".

A name may be coarse; the numbers come from the terms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.fx as fx

from ringopt.expr.bands import band_of, pattern_around
from ringopt.expr.evaluate import evaluate, show
from ringopt.expr.simplify import COMPARISONS, substitute
from ringopt.expr.terms import Affine, Apply, Score, Term, axis, conjuncts, constant, loads, walk
from ringopt.ir.notes import INPUT
from ringopt.recognize.lift import pairs
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

# A condition without a name is written out up to this many characters.
LONGEST = 60


def name_of_mask(
    pattern: str,
    conditions: Sequence[Term],
    bias: Term | None,
    learned: Callable[[fx.Node], bool],
    score: Term | None = None,
) -> str:
    """The name of a mask for the report: parts joined by " & ", "full" without any. `learned`: whether a source is a
    parameter."""
    names = [] if pattern == "full" else [name_of_pattern(pattern)]
    names += dict.fromkeys(_name_of_condition(condition) for condition in conditions)
    if bias is not None:
        names.append(_name_of_bias(bias, learned))
    if score is not None:
        names.append(name_of_modifier(score))
    return " & ".join(names) or "full"


def name_of_pattern(pattern: str) -> str:
    """Without the numbers of a long list; in "causal & blocks(64x64)" the list is of the keys up to the query."""
    if pattern.startswith("blocks"):
        causal = "" if pattern.endswith(",both)") else "causal & "
        return f"{causal}{pattern.partition(';')[0]})"
    return "documents" if pattern.startswith("documents") else pattern


def _name_of_condition(condition: Term) -> str:
    band = band_of(condition)
    if band is not None:
        pattern, exact = pattern_around(*band)
        return pattern if exact else show(condition)
    sources = _sources_of(condition)
    if "r" in condition.axes:
        return _other(condition, sources)
    if not condition.axes & {"q", "k"}:
        return f"switch({sources})" if sources else show(condition)
    if not condition.axes & {"q"}:
        return f"padding({sources})" if sources else show(condition)
    if is_stored(condition):
        return "stored"
    if isinstance(condition, Apply):
        if condition.op == "logical_or":
            return f"({' | '.join(_name_of_condition(arg) for arg in condition.args if isinstance(arg, Term))})"
        if condition.op == "logical_and":
            return f"({' & '.join(map(_name_of_condition, conjuncts(condition)))})"
        if condition.op in COMPARISONS and isinstance(condition.args[1], Term):
            return name_of_comparison(condition, sources)
    return _other(condition, sources)


def _other(condition: Term, sources: str) -> str:
    text = show(condition)
    return f"mask({sources})" if sources else text if len(text) <= LONGEST else "mask"


def name_of_comparison(condition: Apply, sources: str) -> str:
    """The same vector read at the query and at the key: terms are interned, so sameness is identity."""
    left, right = (arg for arg in condition.args if isinstance(arg, Term))
    if left.axes & {"q", "k"} == {"k"}:
        left, right = right, left
    same = left.axes & {"q", "k"} == {"q"} and substitute(left, {"q": axis("k")}) is right
    if not same:
        return _other(condition, sources)
    if condition.op != "eq":
        return f"order({sources or show(left)})"
    return f"documents({sources})" if sources else f"chunks({show(left)})"


def _name_of_bias(bias: Term, learned: Callable[[fx.Node], bool]) -> str:
    sources = {load.source for load in loads(bias)}
    numbers, data = (_labels(source for source in sources if learned(source) is kind) for kind in (True, False))
    if is_stored(bias) and not numbers:
        return "stored"
    parts = [f"learned: {numbers}"] if numbers else []
    parts += [data] if data else []
    return f"bias({'; '.join(parts)})" if parts else "bias"


def name_of_modifier(score: Term) -> str:
    """softcap(30) is 30 * tanh(score / 30), filled(c) puts a number where c does not hold; any other function is
    written out, or only named."""
    if isinstance(score, Apply) and score.op == "where" and isinstance(score.args[1], Score):
        return f"filled({' & '.join(map(_name_of_condition, conjuncts(score.args[0])))})"  # type: ignore[arg-type]
    operand = score
    while isinstance(operand, Apply) and operand.op in ("mul", "div"):
        tensors = [arg for arg in operand.args if isinstance(arg, Term) and constant(arg) is None]
        if len(tensors) != 1:
            break
        operand = tensors[0]
    if isinstance(operand, Apply) and operand.op == "tanh" and operand is not score and is_of_score_alone(score):
        with unset_fake_temporarily():
            cap = evaluate(score, {"score": torch.tensor(1e30, dtype=torch.float64)}, []).item()
        return f"softcap({cap:g})"
    text = show(score, lambda source: label(source) or "constant")
    return f"score({text})" if len(text) <= LONGEST else "score"


def is_of_score_alone(term: Term) -> bool:
    """Whether it reads no tensor, and no place: a mask may be filled in before the cap."""
    return not loads(term) and not any(isinstance(each, Affine) and each.steps for each in walk(term))


def is_stored(term: Term) -> bool:
    """Whether the program holds the values of all pairs."""
    return any(pairs(load.index) for load in loads(term))


def _sources_of(term: Term) -> str:
    return _labels(load.source for load in loads(term))


def _labels(sources: Iterable[fx.Node]) -> str:
    return ", ".join(sorted({label(source) for source in sources} - {""}))


def label(node: fx.Node) -> str:
    """The input that a source comes from, as the program calls it; the node's own name where there are several, and ""
    for a constant."""
    inputs: set[fx.Node] = set()
    stack, seen = [node], set[fx.Node]()
    while stack:
        each = stack.pop()
        if each not in seen:
            seen.add(each)
            inputs |= {each} if each.op == "placeholder" else set()
            stack.extend(each.all_input_nodes)
    if len(inputs) == 1:
        return tidy(str(next(iter(inputs)).meta.get(INPUT, node.name)))
    return node.name if inputs else ""


def tidy(name: str) -> str:
    """L_self_modules_encoder_modules_bias_parameters_weight_ -> encoder.bias.weight."""
    name = re.sub(r"^[Ll]_(self_)?(kwargs_)?", "", name).strip("_")
    return re.sub(r"_*(modules|parameters|buffers)_+", ".", name).strip("._")
