"""Rules for operators of other libraries: what one does to the tokens of a sequence.

    ringopt.rule("mylib::rotate", tokenwise={"x": 1, "angles": 0})
    ringopt.rule("mylib::attend", AttentionRule("q", "k", "v", layout="BSHD", causal="is_causal"))
    ringopt.rule("mylib::delta_rule", ScanRule(tokens=("q", "k", "v", "g", "beta"), state="initial_state", last=1))

    @ringopt.rule("mylib::attend")                    # asked of every call, by the names of the operator's arguments
    def attend(is_causal, softcap, **others):
        return Gathered("softcap") if softcap else AttentionRule("q", "k", "v", causal=is_causal)

An operator without a rule may mix tokens in any way, so all of its tokens are gathered. A rule is believed as far as
the shapes of a call bear it out; `verify=True` compares numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.fx as fx

from ringopt.errors import RuleError, first_line
from ringopt.ir.nodes import OWN_NAMES, arguments_of, value_of
from ringopt.ir.symbolic_sizes import same
from ringopt.torch_compat.schema import (
    OpOverload,
    OpOverloadPacket,
    operator_behind,
    overload_name,
    packet_name,
    schema_of,
)

Dims = int | tuple[int, ...]
OF_BUILD = r"(_(cuda|rocm|xpu|cpu))?_[0-9a-z]+(_dirty)?"
HUB_BUILDS = {
    "flash_attn": re.compile(f"_flash_attn2?{OF_BUILD}"),
    "flash_attn_3": re.compile(f"_flash_attn3{OF_BUILD}"),
}
AttentionLayout = Literal["BHSD", "BSHD", "SHD"]


@dataclass(frozen=True)
class Tokenwise:
    """Element i of each result, along a dim, is made of elements i of the arguments along theirs, and of no other.

    dims     of each argument, by its name; of the only tensor argument, a number. Those not named are read whole.
             Several dims are a tuple, in one order for all
    returns  the same for each result, in a sequence; None: a result that nobody may read. Where all arguments have the
             same dims, so have all results
    """

    dims: Dims | Mapping[str, Dims]
    returns: Dims | Sequence[Dims | None] | None = None


@dataclass(frozen=True)
class Pointwise:
    """Each element of the results is made of one element of each argument, broadcast: no dim is mixed."""


@dataclass(frozen=True)
class AttentionRule:
    """softmax(q k' scale + mask) v. Names are those of arguments of the operator; where a value is asked for, a name
    stands for what the argument is in the call.

    layout    of q, k, v and the result; S H D is packed: one batch, with the ends of its sequences in `segments`
    mask      added to the scores, or boolean: True is seen; as for scaled_dot_product_attention
    causal    whether a query sees no later key
    scale     None: 1 / sqrt(D)
    dropout   of weights. ringopt draws them by position, not as the operator does
    window    how many keys before and after its own a query sees; -1 and None: all
    align     where there are not as many keys as queries: whether `causal` and `window` match the first of each, or the
              last
    segments  arguments with the cumulative lengths (cu_seqlens) of the packed queries and keys
    out       which of several results is the attention; nobody may read the others
    backward  the operator that an autograd.Function around this one calls in its backward, for the same gradient
    """

    q: str = "q"
    k: str = "k"
    v: str = "v"
    layout: AttentionLayout = "BHSD"
    mask: str | None = None
    causal: bool | str = False
    scale: float | str | None = None
    dropout: float | str = 0.0
    window: tuple[int | str, int | str] | None = None
    align: Literal["first", "last"] | None = None
    segments: tuple[str, str] | None = None
    out: int = 0
    backward: str | None = None


@dataclass(frozen=True)
class ScanRule:
    """A recurrence: results at a token, and the state behind it, are made of the token and the state before it.

    tokens    arguments with tokens along `dim`; the others are the same for all tokens
    state     the argument that is the state before the first token; None in a call: zeros
    last      which result is the state behind the last token; the other results have tokens along `dim`
    dim       of tokens
    axes      where the last state is M S + U of the first, S: what M does along each dim of the state. "point": a
              coefficient for each index, "mixed": M sums over it, "free": all indices have the same M. None: the state
              is in no affine way made of that before: ranks share heads, or run one after the other
    additive  of `tokens`, what U is made of: where they are zeros, so is U
    segments  the argument that tells packed sequences apart, None in a call: there is one. Cumulative lengths [N + 1]
              (cu_seqlens) of one batch, with a state for each sequence; or the number of the sequence that each token
              is of [B, n], of which 0 goes on from the first state
    heads     where heads know nothing of each other: the dim of heads of each argument that has one, by its name, and
              of each result, "0" and on. Ranks may then share heads, all tokens of each
    """

    tokens: tuple[str, ...]
    state: str = "initial_state"
    last: int = 1
    dim: int = 1
    axes: tuple[Literal["point", "mixed", "free"], ...] | None = None
    additive: tuple[str, ...] = ()
    segments: str | None = None
    heads: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Gathered:
    """It needs all tokens; `why` is told in the report."""

    why: str = ""


Declaration = Tokenwise | Pointwise | AttentionRule | ScanRule | Gathered
Decide = Callable[..., Declaration]
F = TypeVar("F", bound=Decide)


@dataclass(frozen=True)
class Declared:
    """What was declared of an operator, and the operator that takes its place on shards, if another one does."""

    says: Declaration | Decide
    local: OpOverload | None = None


@dataclass
class Registry:
    """Of rules by the names of operators: a user's own before those of plugins, and those before what ringopt ships."""

    levels: tuple[dict[str, Declared], ...] = field(default_factory=lambda: ({}, {}, {}))
    level: int = 0

    def find(self, names: Sequence[str]) -> Declared | None:
        return next((level[name] for level in self.levels for name in names if name in level), None)

    @contextmanager
    def filling(self, level: int) -> Any:
        """What is declared inside is of this level."""
        before, self.level = self.level, level
        try:
            yield
        finally:
            self.level = before


REGISTRY = Registry()
OF_PLUGINS, SHIPPED = 1, 2


def rule(
    op: Any,
    says: AttentionRule | ScanRule | None = None,
    *,
    tokenwise: Dims | Mapping[str, Dims] | None = None,
    returns: Dims | Sequence[Dims | None] | None = None,
    pointwise: bool = False,
    gathered: str | None = None,
    local: Any = None,
) -> Callable[[F], F]:
    """Declares what `op` ("mylib::op", torch.ops.mylib.op, or an overload of it) does to the tokens of a sequence: an
    AttentionRule, a ScanRule, or one of `tokenwise` (the dim of tokens, or that of each argument by its name, and in
    `returns` of each result), `pointwise` and `gathered` (the reason). Without any it decorates a function that is
    asked of every call. `local` is an operator of the same arguments that takes its place on shards. Raises RuleError.

    Programs that are compiled already keep the rule that they were compiled with."""
    name = name_of(op)
    given: list[Declaration] = [Tokenwise(tokenwise, returns)] if tokenwise is not None else []
    given += [Pointwise()] if pointwise else []
    given += [says] if says is not None else []
    given += [Gathered(gathered)] if gathered is not None else []
    if len(given) > 1 or (returns is not None and tokenwise is None):
        kinds = "an AttentionRule, a ScanRule, tokenwise (with returns), pointwise and gathered"
        raise RuleError(f"rule for {name}: give one of {kinds}")
    there = None if local is None else operator_of(name_of(local))
    if local is not None and there is None:
        raise RuleError(f"rule for {name}: there is no operator {name_of(local)}; define it before the rule")
    if given:
        declare(name, Declared(given[0], there))

    def decorated(decide: F) -> F:
        if given:
            raise RuleError(f"rule for {name}: it says {given[0]} already, and decorates {decide} too")
        declare(name, Declared(decide, there))
        return decide

    return decorated


def declare(name: str, declared: Declared) -> None:
    """Raises RuleError for a rule that the schema contradicts, where the operator is there already."""
    op = operator_of(name)
    wrong = misnamed(op, declared) if op is not None else ""
    if wrong:
        raise RuleError(f"rule for {name}: {wrong}")
    REGISTRY.levels[REGISTRY.level][name] = declared


def name_of(op: Any) -> str:
    """As "mylib::op", or "mylib::op.Tensor" of an overload that has a name."""
    op = operator_behind(op)
    if isinstance(op, OpOverload):
        overload = overload_name(op)
        name = schema_of(op).name + ("" if overload == "default" else f".{overload}")
    else:
        name = op if isinstance(op, str) else packet_name(op)
    namespace, _, rest = name.partition("::")
    if not rest:
        raise RuleError(f'a rule is for an operator: "mylib::op" or torch.ops.mylib.op, not {op!r}')
    if namespace in OWN_NAMES:
        raise RuleError(f"rule for {name}: operators of torch and ringopt have theirs; rules are for other libraries")
    return name


def operator_of(name: str) -> OpOverload | None:
    """The operator, if its library is loaded."""
    (namespace, _, rest) = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    found = getattr(packet, overload or packet.overloads()[0], None)
    return found if isinstance(found, OpOverload) else None


def misnamed(op: OpOverload, declared: Declared) -> str:
    """What a rule says of arguments that the operator has not; "" where all are there."""
    names, says = [argument.name for argument in schema_of(op).arguments], declared.says
    asked: list[str] = []
    if isinstance(says, Tokenwise):
        asked = list(says.dims) if isinstance(says.dims, Mapping) else []
    elif isinstance(says, AttentionRule):
        given = (says.q, says.k, says.v, says.mask, says.causal, says.scale, says.dropout)
        asked = [each for each in (*given, *(says.window or ()), *(says.segments or ())) if isinstance(each, str)]
    elif isinstance(says, ScanRule):
        asked = [*says.tokens, says.state, *says.additive, *([says.segments] if says.segments else [])]
        asked += [name for name in says.heads if not name.isdigit()]
    lacking = [name for name in asked if name not in names]
    if lacking:
        return f"it names {', '.join(lacking)}, and the arguments of the operator are {', '.join(names)}"
    if schema_of(op).is_mutable:
        return "the operator writes to its arguments, so it runs whole on every rank"
    if isinstance(says, ScanRule) and not set(says.additive) <= set(says.tokens):
        return f"additive names {', '.join(says.additive)}, and tokens are {', '.join(says.tokens)}"
    tensors = [argument.name for argument in schema_of(op).arguments if "Tensor" in str(argument.type)]
    if isinstance(says, Tokenwise) and not isinstance(says.dims, Mapping) and len(tensors) != 1:
        dims = ", ".join(f'"{name}": {says.dims}' for name in tensors)
        return f"its tensors are {', '.join(tensors)}: say which run along, tokenwise={{{dims}}} if all do"
    if declared.local is not None and [a.name for a in schema_of(declared.local).arguments] != names:
        return f"{schema_of(declared.local).name} has other arguments than {', '.join(names)}"
    return ""


def declared_for(target: Any) -> Declared | None:
    """What was declared of the operator that a node calls."""
    if not isinstance(target, OpOverload) or target.namespace in OWN_NAMES:
        return None
    name, known = schema_of(target).name, library_name(target)
    return REGISTRY.find((f"{name}.{overload_name(target)}", name, known))


def library_name(op: OpOverload) -> str:
    """The name of an operator in its library: a build of the Hub's `kernels` has a namespace of its own, with the
    library's name, a device and an identifier, as `_flash_attn2_cuda_9e27194::_flash_attn_forward`."""
    namespace, name = schema_of(op).name.split("::")
    build = next((library for library, builds in HUB_BUILDS.items() if builds.fullmatch(namespace)), namespace)
    return f"{build}::{name}"


def declaration_of(node: fx.Node) -> Declaration | None:
    """Of one call; None where there is no rule. A rule that fails, or names arguments that are not there, is one to
    gather."""
    declared = declared_for(node.target)
    if declared is None:
        return None
    wrong = misnamed(node.target, declared)
    if wrong:
        return Gathered(f"its rule is not used: {wrong}")
    if not callable(declared.says):
        return declared.says
    given = {name: fx.map_arg(x, value_of) for name, x in arguments_of(node).items()}
    try:
        says = declared.says(**given)
    except Exception as error:  # of whatever kind: it is the user's
        return Gathered(f"its rule failed: {type(error).__name__}: {first_line(error)}")
    if not isinstance(says, Declaration):
        kinds = ", ".join(kind.__name__ for kind in get_args(Declaration))
        return Gathered(f"its rule gave {says!r}, which is none of {kinds}")
    wrong = misnamed(node.target, Declared(says, declared.local))
    return Gathered(f"its rule is not used: {wrong}") if wrong else says


def is_foreign(node: fx.Node) -> bool:
    """Whether a node calls an operator of another library than torch and ringopt."""
    return isinstance(node.target, OpOverload) and node.target.namespace not in OWN_NAMES


def line_to_write(node: fx.Node, dim: int) -> str:
    """The line of code that says that an operator without a rule works token by token: along `dim` of all arguments
    that have as many tokens there as the first one that has the dim."""
    sizes = {name: x.shape for name, arg in arguments_of(node).items() if isinstance(x := value_of(arg), torch.Tensor)}
    tokens = next((shape[dim] for shape in sizes.values() if len(shape) > dim), None)
    along = [name for name, shape in sizes.items() if len(shape) > dim and same(shape[dim], tokens)]
    dims = str(dim) if len(sizes) == 1 else "{" + ", ".join(f'"{name}": {dim}' for name in along) + "}"
    return f'ringopt.rule("{schema_of(node.target).name}", tokenwise={dims})'
