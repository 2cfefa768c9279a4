"""Branches and loops that data decide, where Dynamo would end its graph, traced as if each were taken: for a caller
that makes that the same program (frontend/data_sizes/predication.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce, wraps
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.misc import NewGlobalVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ringopt.torch_compat.dynamo import COMPARISONS
from ringopt.torch_compat.dynamo_bytecode import (
    end_of_or,
    is_assertion,
    jumps_by_truth,
    live_at,
    may_catch,
    raised_by,
    way_to_go,
)

__all__ = [
    "ERRORS", "JUMP_BREAK", "Branch", "RowLoop", "branches_and_loops", "decides", "places_taken", "raises",
    "takes_branches",
]  # fmt: skip

JUMP_BREAK = ("Data-dependent branching", "generic_jump")  # how Dynamo's reasons begin where it ends a graph at one


@dataclass(eq=False)
class RowLoop:
    """Over the places where the tensor `over`, of one dim, is not 0: turn k was traced with the number k, for all of
    its `turns` elements. `rows` are the tensors that have these numbers, `items` Dynamo's variables for them. `place`:
    the code, and where in it the loop is."""

    over: fx.Node
    turns: int
    place: tuple[CodeType, int]
    rows: list[fx.Node] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Branch:
    """What was traced of a branch, or of a turn of a loop: its `nodes`, in order. It is taken where the tensor or
    number `condition` has the truth `when`, or where the loop has a row that is the number `when`; and where the branch
    is taken `within` which it stands.

    ended: whether the program goes on behind it where it goes on without it.
    changes: which names and objects of Python are others behind it, "" for none; tensors of local names are `carried`
        instead, each with what the name stood for before (None: nothing; of constants their text)."""

    condition: fx.Node | RowLoop
    when: bool | int
    place: tuple[CodeType, int]
    within: Branch | None
    nodes: list[fx.Node] = field(default_factory=list)
    ended: bool = False
    changes: str = ""
    carried: list[tuple[Any, fx.Node]] = field(default_factory=list)


@dataclass
class Trace:
    """Of one graph: all loops and branches, where one would raise an error, and those of which the end was not reached
    yet, the innermost last."""

    loops: list[RowLoop] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    raised: set[tuple[CodeType, int]] = field(default_factory=set)
    open: list[Begun] = field(default_factory=list)


_traces = WeakKeyDictionary[Any, Trace]()
_latest = Trace()


def branches_and_loops() -> tuple[list[Branch], list[RowLoop], set[tuple[CodeType, int]]]:
    """Of the graph that a backend was given; and the places at which it `raises` an error."""
    trace = trace_of(InstructionTranslator.current_tx())
    places_taken()
    return trace.branches, trace.loops, trace.raised


def places_taken() -> set[tuple[CodeType, int]]:
    """Where the latest trace took a branch or a loop, if no graph came of it; at the second call there are none."""
    global _latest
    found = {branch.place for branch in _latest.branches} | {loop.place for loop in _latest.loops} | _latest.raised
    _latest = Trace()
    return found


def decides(condition: Any) -> None:
    """Stands in the graph for a branch or a loop, so that Dynamo keeps what decides, and what is there without it."""


ERRORS: dict[str, type[Exception]] = {}  # by the names that they have in a graph


def raises(condition: Any, when: bool, error: str, words: str) -> None:
    """Stands in the graph for a branch that raises an error, one of ERRORS, where `condition` has the truth `when`."""


def trace_of(tx: Any) -> Trace:
    """Of the graph that a translator of Dynamo's works on."""
    global _latest
    if tx.output.root_tracer not in _traces:
        _latest = _traces[tx.output.root_tracer] = Trace()
    return _traces[tx.output.root_tracer]


def takes_branches(
    when: Callable[[CodeType, int], bool],
    over: Callable[[fx.Node], fx.Node | None],
    most: int,
    left: Callable[[CodeType], None],
) -> None:
    """From here on Dynamo does so, where `when(code, place)`. `over(node)`: the tensor of one dim, and known length, of
    which a tensor has the places that are not 0; None where that is not known. `most`: turns of loops in one
    graph; `left(frame)` is called where a frame has more."""
    kind: Any = TensorVariable
    base: Any = InstructionTranslatorBase
    unpack, step = kind.unpack_var_sequence, base.step

    @wraps(unpack)
    def unpacked(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        node, place = self.as_proxy().node, (tx.f_code, tx.current_instruction.offset)
        found = over(node) if when(*place) and not args and not kwargs else None
        if found is None:
            return unpack(self, tx, *args, **kwargs)
        turns = found.meta["example_value"].shape[0]
        if turns + sum(loop.turns for loop in trace_of(tx).loops) > most:
            left(tx.output.root_tx.f_code)
            return unpack(self, tx, *args, **kwargs)
        return rows_of(tx, RowLoop(found, turns, place), len(node.meta["example_value"].shape) == 1)

    @wraps(step)
    def stepped(self: Any) -> Any:
        if self.instruction_pointer is not None:
            instruction = self.instructions[self.instruction_pointer]
            if when(self.f_code, instruction.offset):
                before(self, instruction)
        return step(self)

    function: Any = BuiltinVariable
    index = function.call_index

    @wraps(index)
    def indexed(self: Any, tx: Any, number: Any) -> Any:  # before torch 2.13 the value of no tensor
        known = known_value(number.as_proxy().node) if isinstance(number, TensorVariable) else None
        return index(self, tx, number) if known is None else VariableTracker.build(tx, int(known))

    kind.unpack_var_sequence, base.step, function.call_index = unpacked, stepped, indexed
    function.call_function_handler_cache.clear()  # which holds the methods of before


def rows_of(tx: Any, loop: RowLoop, numbers: bool) -> list[Any]:
    """A tensor for each place, whose value Dynamo knows: without dims where they are `numbers`, or of one element."""
    make = VariableTracker.build(tx, torch.tensor)
    for turn in range(loop.turns):
        loop.items.append(make.call_function(tx, [VariableTracker.build(tx, turn if numbers else [turn])], {}))
    loop.rows = [item.as_proxy().node for item in loop.items]
    tx.output.create_proxy("call_function", decides, (fx.Proxy(loop.over, tx.output.current_tracer),), {})
    trace_of(tx).loops.append(loop)
    return list(loop.items)


# ---- one instruction -------------------------------------------------------------------------------------------------
def before(tx: Any, instruction: Any) -> None:
    """What is to be known, or done, before `instruction` is traced."""
    trace = trace_of(tx)
    while trace.open and trace.open[-1].ends_at(tx, instruction):
        trace.open.pop().end()
    if not tx.stack:
        return
    if instruction.opname == "FOR_ITER":
        loop, turn = loop_at(trace, tx.stack[-1])
        if loop is not None and turn < loop.turns:
            trace.open.append(Begun(trace, tx, Branch(loop, turn, loop.place, innermost(trace)), [instruction]))
    elif jumps_by_truth(instruction) and not is_assertion(tx, instruction):
        known, place = known_truth(tx.stack[-1].realize()), (tx.f_code, instruction.offset)
        if known is None:
            known = goes_on(tx, instruction, trace)
        again = any(begun.tx is tx and begun.branch.place == place for begun in trace.open)  # of a loop without a bound
        if known is None and not again and (condition := unknown_truth(tx.stack[-1].realize())) is not None:
            part, last = tx.stack[-1].realize(), end_of_or(tx, instruction)
            tx.output.create_proxy("call_function", decides, (part.as_proxy(),), {})
            if last is not None and isinstance(part, TensorVariable):
                known = False
                if not (trace.open and isinstance(trace.open[-1], BehindOr) and trace.open[-1].ends_at(tx, last)):
                    branch = Branch(condition, known, place, innermost(trace))
                    trace.open.append(BehindOr(trace, tx, branch, [last]))
                trace.open[-1].parts.append(part)  # type: ignore[attr-defined]
            else:
                known, ends = way_to_go(tx, instruction)
                trace.open.append(Begun(trace, tx, Branch(condition, known, place, innermost(trace)), ends))
        if known is not None:
            tx.stack[-1] = VariableTracker.build(tx, known)


def goes_on(tx: Any, jump: Any, trace: Trace) -> bool | None:
    """Of a jump to what only raises an error: the truth with which the program goes on; from here on that is asserted.
    None where it is no such jump, or something may catch the error, or not all of the program comes here."""
    condition, found = unknown_truth(tx.stack[-1].realize()), raised_by(tx, jump)
    if condition is None or found is None or trace.open or tx.output.current_tracer is not tx.output.root_tracer:
        return None
    frame = tx
    while frame is not None:
        if may_catch(frame, found.error):
            return None
        frame = getattr(frame, "parent", None)
    name = f"{found.error.__module__}.{found.error.__qualname__}"
    ERRORS[name] = found.error
    asserted = (fx.Proxy(condition, tx.output.current_tracer), found.when, name, found.words)
    tx.output.create_proxy("call_function", raises, asserted, {})
    trace.raised.add((tx.f_code, jump.offset))
    return not found.when


def loop_at(trace: Trace, iterator: Any) -> tuple[RowLoop | None, int]:
    """The loop whose rows an iterator gives, and which comes next."""
    items = vars(iterator.realize()).get("items")
    for loop in trace.loops:
        if isinstance(items, list) and items and items[0] is loop.items[0]:
            return loop, iterator.index
    return None, 0


def innermost(trace: Trace) -> Branch | None:
    """The branch in which the trace is."""
    return trace.open[-1].branch if trace.open else None


def known_truth(value: Any) -> bool | None:
    """Of a tensor whose value Dynamo knows, or that is made of an element of an arange."""
    found = known_value(value.as_proxy().node) if isinstance(value, TensorVariable) else None
    return None if found is None else bool(found)


def known_value(node: Any) -> Any:
    """The number that a tensor has; None where that is not known."""
    if not isinstance(node, fx.Node):
        return node
    constant = getattr(node.meta.get("example_value"), "constant", None)
    if constant is not None:
        return constant
    operands = [*node.args, None, None][:2]
    if node.target is operator.getitem and operands[1] == 0 and getattr(operands[0], "target", None) is torch.arange:
        numbers = operands[0].args
        return 0 if len(numbers) == 1 else numbers[0] if isinstance(numbers[0], int) else None
    known = [known_value(operand) for operand in operands] if node.target in COMPARISONS and not node.kwargs else [None]
    return None if None in known else node.target(*known)


def unknown_truth(value: Any) -> fx.Node | None:
    """The node of a tensor, or of a number that data decide."""
    number = isinstance(value, SymNodeVariable) and bool(free_unbacked_symbols(value.sym_num))
    return value.as_proxy().node if number or isinstance(value, TensorVariable) else None


# ---- one branch ------------------------------------------------------------------------------------------------------
class Begun:
    """A branch of which the trace is not at its end, where one of the instructions `ends` of the frame `tx` comes."""

    def __init__(self, trace: Trace, tx: Any, branch: Branch, ends: list[Any]):
        self.tx, self.branch, self.ends = tx, branch, ends
        self.graph = tx.output.graph
        self.last = next(iter(reversed(self.graph.nodes)), None)
        self.before = State(tx, live_at(tx.instructions, ends[-1]))
        trace.branches.append(branch)

    def ends_at(self, tx: Any, instruction: Any) -> bool:
        return tx is self.tx and any(instruction is end for end in self.ends)

    def end(self) -> None:
        """Takes what was traced since it began."""
        branch, behind = self.branch, State(self.tx, set(self.before.names))
        branch.ended = self.tx.output.graph is self.graph
        node = self.last.next if self.last is not None else self.graph._root.next
        while node.op != "root":
            branch.nodes.append(node)
            node = node.next
        branch.carried, branch.changes = self.before.other_in(behind)
        output = self.tx.output
        for old, _ in branch.carried if branch.ended else ():
            if isinstance(old, fx.Node):  # which nothing else may read, as if the branch were always taken
                output.create_proxy("call_function", decides, (fx.Proxy(old, output.current_tracer),), {})


class BehindOr(Begun):
    """What follows the first `or` of a condition, computed where the first of its `parts` is false: up to the jump that
    decides."""

    def __init__(self, trace: Trace, tx: Any, branch: Branch, ends: list[Any]):
        super().__init__(trace, tx, branch, ends)
        self.parts: list[Any] = []

    def end(self) -> None:
        """Has the whole condition decide."""
        stack, last = self.tx.stack, self.tx.stack[-1].realize()
        known = last.is_python_constant()
        if not known or not last.as_python_constant():
            self.parts += [] if known else [last]
            either = VariableTracker.build(self.tx, torch.logical_or)
            stack[-1] = reduce(lambda one, other: either.call_function(self.tx, [one, other], {}), self.parts)
        super().end()


class State:
    """What a program has in Python: the local `names` that are read later, and what lists and attributes hold."""

    def __init__(self, tx: Any, live: set[str]):
        self.names = {name: value for name, value in tx.symbolic_locals.items() if name in live}
        self.held: dict[int, tuple[Any, Any]] = {}
        found = list[Any]()
        roots = (*tx.symbolic_locals.values(), *tx.stack[:-1], *tx.output.side_effects.id_to_variable.values())
        VariableTracker.visit(found.append, list(roots))
        for value in found:
            self.held[id(value)] = (value, contents(value))
        self.attributes = {
            var: {name: id(value) for name, value in found.items()}
            for var, found in tx.output.side_effects.store_attr_mutations.items()
        }

    def other_in(self, later: State) -> tuple[list[tuple[Any, fx.Node]], str]:
        """The tensors of names that are others there, and what else is."""
        carried, changes = list[tuple[Any, fx.Node]](), list[str]()
        for name in {*self.names, *later.names}:
            one, other = (node_or_value(each.names.get(name)) for each in (self, later))
            if one is not other and one != other:
                (carried.append((one, other)) if isinstance(other, fx.Node) else changes.append(name))
        for key, (value, content) in later.held.items():
            known = self.held.get(key)
            kind = getattr(value, "mutation_type", None)
            if known[1] != content if known is not None else getattr(kind, "is_modified", False):
                changes.append(f"a {type(value).__name__.removesuffix('Variable').lower()}")
        for var, attributes in later.attributes.items():
            new = isinstance(var.mutation_type, AttributeMutationNew) and not isinstance(var, NewGlobalVariable)
            if self.attributes.get(var, attributes if new else {}) != attributes:
                changes += [name for name in attributes][:1] or ["an attribute"]
        return carried, ", ".join(changes)


def node_or_value(variable: Any) -> Any:
    """The node of a tensor; what stands for the value of anything else, which is equal for equal constants."""
    if variable is None:
        return None
    variable = variable.unwrap() if hasattr(variable, "unwrap") else variable
    if isinstance(variable, (TensorVariable, SymNodeVariable)):
        return variable.as_proxy().node
    return repr(variable.as_python_constant()) if variable.is_python_constant() else id(variable)


def contents(variable: Any) -> Any:
    """Of a list, a dict or an iterator: which objects, and how far; None of anything else."""
    items = vars(variable).get("items")
    pairs = [*items, *items.values()] if isinstance(items, dict) else items
    modified = isinstance(kind := variable.mutation_type, ValueMutationExisting) and kind.is_modified
    held = tuple(map(id, pairs)) if isinstance(pairs, (list, tuple)) else None
    return held, vars(variable).get("index"), modified
