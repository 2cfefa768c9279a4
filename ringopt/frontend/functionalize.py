"""Writes become values: afterwards every name stands for one value, wherever it is read.

Which nodes share memory is read off the storages of the captured fake values, so a reshape or `to` that happens to
return a view counts as one. A write makes a new value; views of what was written are made again, from the new value,
when they are next read; a write through a view is pasted into its base. What a write does to its target is asked of
the op's own functional form, and an op without one is refused.
"""

from __future__ import annotations

import operator
from collections import Counter
from itertools import accumulate
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.op_families import SPLITS
from ringopt.dims.undone_views import HALVES, PARTS, is_unchanged, undone, undone_in_pairs
from ringopt.ir.autograd_function import GradientArguments, hands_gradient_on
from ringopt.ir.memory import laying_out
from ringopt.ir.nodes import (
    carries_gradient,
    is_aten,
    is_write,
    named,
    op_name,
    origin,
    shape_of,
    source_line,
    value_of,
    written_args,
)
from ringopt.ir.notes import LET_GO, STANDS_FOR, UNSEEN, VIEW_OF, WRITTEN
from ringopt.ir.refusal import Refusal
from ringopt.ir.returning import returning
from ringopt.ir.symbolic_sizes import place_of, same
from ringopt.torch_compat.operators import GIVES_MEMORY
from ringopt.torch_compat.tensors import storage_key

aten = torch.ops.aten


class Unwritable(Exception):
    """A write that has no functional form here."""

    def __init__(self, sentence: str, node: fx.Node):
        where = source_line(node)
        self.refusal = Refusal(f"{sentence} ({where})" if where else sentence, node)
        super().__init__(self.refusal.sentence)


class Functional:
    """Rewrites one graph. `now[root]` counts the writes to a root; `made[node]` is the latest value of a node and the
    count at which it was made."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.now: dict[fx.Node, int] = {}
        self.made: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.parents: dict[fx.Node, fx.Node] = {}
        self.owner: dict[int, fx.Node] = {}  # storage -> the root that owns it
        self.tangled: set[int] = set()  # storages with more than one root: whose views are not understood
        self.carries: dict[fx.Node, bool] = {}
        self.given_back: dict[fx.Node, fx.Node] = {}  # what is returned of memory that was written
        self.outputs = Counter[fx.Node]()  # how many outputs lie in the memory of a root
        self.seen = set[fx.Node]()  # what autograd sees a write to
        self.overwritten = set[int | None]()  # storages that some write writes to

    def rewrite(self) -> None:
        """Raises Unwritable."""
        if not any(is_write(node) for node in self.graph.nodes):
            return
        part_by_part(self.graph)
        nodes = list(self.graph.nodes)
        self.overwritten = {storage(x) for node in nodes if is_write(node) for x in written_args(node)}
        for node in nodes:
            with self.graph.inserting_before(node):
                if node.op == "output":
                    self.copy_back()
                    self.outputs.update(map(self.root, map(self.written, node.all_input_nodes)))
                    node.args = fx.map_arg(node.args, self.returned)
                    continue
                args = fx.map_arg((node.args, node.kwargs), self.latest)
                if is_write(node):
                    self.write(node, *args)
                    continue
                node.args, node.kwargs = args
            self.enter(node)
        for node in reversed(nodes):
            if WRITTEN in node.meta:
                self.graph.erase_node(node)

    def enter(self, node: fx.Node) -> None:
        """Notes which earlier node the memory of `node` belongs to; or that `node` is that one, as `x.to(x.dtype)` is
        x."""
        memory = storage(node)
        first = next(iter(node.all_input_nodes), None)
        original = first.meta.get(STANDS_FOR, first) if first is not None else None
        if memory is not None and node.meta.get(LET_GO):
            self.owner[memory] = node
        elif memory is not None and original is not None and memory == storage(original):
            if is_unchanged(node, original):
                node.meta[WRITTEN] = original
                return
            self.parents[node] = original
        elif memory is not None and self.owner.setdefault(memory, node) is not node:
            self.tangled.add(memory)
        self.made[node] = (node, self.now.get(self.root(node), 0))
        self.note_gradient(node)

    def note_gradient(self, node: fx.Node) -> None:
        self.carries[node] = carries_gradient(node, any(self.carries.get(arg, True) for arg in node.all_input_nodes))

    def root(self, node: fx.Node) -> fx.Node:
        while node in self.parents:
            node = self.parents[node]
        return node

    def latest(self, node: fx.Node) -> fx.Node:
        """The value of `node` after all writes so far."""
        node = self.written(node)
        if node not in self.made:
            return node
        value, count = self.made[node]
        if count == self.now.get(self.root(node), 0):
            return value
        parent = self.latest(self.parents[node])
        original_args = (parent, *node.args[1:])
        value = self.emit(node.target, original_args, node.kwargs, node)
        value.meta[STANDS_FOR], value.meta[VIEW_OF] = node, 0
        self.made[node] = (value, self.now[self.root(node)])
        return value

    def returned(self, node: fx.Node) -> fx.Node:
        """What the caller gets: an input that was written is that input, and a view of what was written is a view of
        what else is returned of it."""
        node = self.written(node)
        root = self.root(node)
        if not self.now.get(root) or (root.op != "placeholder" and self.outputs[root] < 2):
            return self.latest(node)
        if node not in self.given_back:
            if node is root:
                self.given_back[node] = root if root.op == "placeholder" else self.latest(root)
            else:
                args = (self.returned(self.parents[node]), *node.args[1:])
                self.given_back[node] = self.emit(node.target, args, node.kwargs, node)
                self.given_back[node].meta[VIEW_OF] = 0
        return self.given_back[node]

    def write(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """The functional form of one mutable op, pasted into the base of its target."""
        if op_name(node) in GIVES_MEMORY:
            raise Unwritable(f"{node.target} gives a tensor the memory of another one", node)
        target = self.written(self.only_target(node))
        root = self.root(target)
        if storage(target) in self.tangled:
            raise Unwritable(f"{node.target} writes to memory that several views share", node)
        new = self.functional(node, args, kwargs)
        value, place = new, target
        while place in self.parents:
            value = self.paste(place, value, node)
            place = self.parents[place]
        if node.meta.get(UNSEEN):
            value = self.with_gradient_of(self.latest(root), value)
        else:
            self.seen.add(root)
        value.meta[STANDS_FOR], new.meta[STANDS_FOR] = root, target
        self.now[root] = self.now.get(root, 0) + 1
        self.made[root] = (value, self.now[root])
        self.made[target] = (value if target is root else new, self.now[root])
        node.meta[WRITTEN] = target

    def with_gradient_of(self, before: fx.Node, value: fx.Node) -> fx.Node:
        """The numbers of `value`; the gradient goes to `before`, unchanged."""
        numbers = self.emit(aten.detach.default, (value,), {}, value)
        both = self.emit(hands_gradient_on(value_of(before)), GradientArguments([numbers], [before], []), {}, value)
        both.meta["val"] = [value_of(both)]
        new = self.emit(operator.getitem, (both, 0), {}, before)
        new.meta |= origin(value)
        return new

    def written(self, node: fx.Node) -> fx.Node:
        """The result of a write is its target, and that of a cast to the same dtype is what was cast."""
        while WRITTEN in node.meta:
            node = node.meta[WRITTEN]
        return node

    def only_target(self, node: fx.Node) -> fx.Node:
        """What a write writes to, of the kinds that are known here: x.op_(...) and op(..., out=x)."""
        targets = written_args(node)
        if not is_aten(node):
            raise Unwritable(f"{node.target} is no ATen operator: what it writes is not known", node)
        if len(targets) != 1:
            raise Unwritable(f"{node.target} writes to several tensors", node)
        if targets[0] is node.kwargs.get("out") or (op_name(node).endswith("_") and targets[0] is node.args[0]):
            return targets[0]
        raise Unwritable(f"{node.target} writes to a list of tensors", node)

    def functional(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        name = op_name(node)
        like, value = args[0], (args[1] if len(args) > 1 else None)
        if name == "zero_":
            return self.instead(like, self.emit(aten.zeros_like.default, (like,), {}, node), node)
        if name == "fill_" and not isinstance(value, fx.Node):
            return self.instead(like, self.emit(aten.full_like.default, (like, value), {}, node), node)
        if name in ("fill_", "copy_"):
            cast = self.emit(aten.to.dtype, (value, value_of(node).dtype), {}, node)
            cast.meta["val"] = value_of(value).to(value_of(node).dtype)
            new = self.emit(aten.expand.default, (cast, list(shape_of(node))), {}, node)
            if value_of(cast).dim() and not self.writes_part(node):
                new = self.laid_out(new, value_of(cast).expand(shape_of(node)), node)
            if self.is_input_to_be_written(node.args[1]) and not self.writes_part(node):
                new = self.emit(aten.clone.default, (new,), {}, node)
            return self.instead(like, new, node)
        if name == "fill_diagonal_" and len(shape_of(node)) == 2 and not named(node, "wrap"):
            how = {"dtype": torch.bool, "device": value_of(node).device}
            diagonal = self.emit(aten.eye.m, shape_of(node), how, node)
            diagonal.meta["val"] = torch.empty_like(value_of(node), dtype=torch.bool)
            return self.emit(aten.masked_fill.Scalar, (like, diagonal, value), {}, node)
        if node.target is aten.bernoulli_.float:
            return self.emit(aten.bernoulli.p, (like, named(node, "p")), {}, node)
        overload, given = returning(node), {key: arg for key, arg in kwargs.items() if key != "out"}
        if overload is None:
            raise Unwritable(f"{node.target} has no form that returns its result", node)
        result = self.emit(overload, args, given, node)
        values = fx.map_arg((args, given), lambda arg: value_of(arg))
        with value_of(node).fake_mode, torch.no_grad():
            found = overload(*values[0], **values[1])
        if found.shape != shape_of(written_args(node)[0]):
            raise Unwritable(f"{node.target} changes the size of what it writes to", node)
        if found.dtype == value_of(node).dtype:
            return result
        result.meta["val"] = value_of(node).to(found.dtype)
        cast = self.emit(aten.to.dtype, (result, value_of(node).dtype), {}, node)
        before = self.latest(written_args(node)[0])
        if found.is_floating_point() or found.is_complex() or not self.carries.get(before, True):
            return cast
        if name not in COMPARISONS:
            raise Unwritable(f"{node.target} writes to a value with a gradient, and autograd does not see it", node)
        return self.instead(before, cast, node)

    def is_input_to_be_written(self, value: Any) -> bool:
        """Whether the memory of `value` is that of an input that gets another value at the end of the program."""
        return isinstance(value, fx.Node) and (
            storage(value) in self.overwritten and self.root(self.written(value)).op == "placeholder"
        )

    def laid_out(self, new: fx.Node, found: torch.Tensor, node: fx.Node) -> fx.Node:
        """A copy in the order that the memory of the target has, where `found`, the value of `new`, has another: views
        that merge dims can then be made of it."""
        there = value_of(node)
        dims = [dim for dim, size in enumerate(there.shape) if not same(size, 1)]
        if all(same(found.stride(dim), there.stride(dim)) for dim in dims):
            return new
        for target, args in laying_out(there.stride()):
            found = target(found, *args)
            new = self.emit(target, (new, *args), {}, node)
            new.meta["val"] = found
        return new

    def instead(self, before: fx.Node, value: fx.Node, why: fx.Node) -> fx.Node:
        """Of what a part is written over, the rest keeps the gradient, and the part need not be at hand."""
        if self.writes_part(why) or not self.carries.get(before, True):
            return value
        new = instead(self.graph, before, value, why)
        self.note_gradient(new)
        return new

    def writes_part(self, node: fx.Node) -> bool:
        place = self.written(self.only_target(node))
        while place in self.parents and op_name(place) not in PARTS:
            place = self.parents[place]
        return place in self.parents

    def paste(self, view: fx.Node, value: fx.Node, why: fx.Node) -> fx.Node:
        """The parent of `view` with `value` where the view looks."""
        parent = self.parents[view]
        latest = self.latest(parent)
        written = self.carries.get(latest, True) or self.carries.get(value, True)
        if value_of(parent).is_complex() and op_name(view) in ((*HALVES, *PARTS) if written else HALVES):
            return self.paste_pairs(view, latest, value, why)
        pasted = undone(view, parent, latest, value)
        if pasted is None:
            raise Unwritable(f"{why.target} writes through {view.target}, which is no view that can be undone", why)
        return self.emit(*pasted, {}, parent)

    def paste_pairs(self, view: fx.Node, latest: fx.Node, value: fx.Node, why: fx.Node) -> fx.Node:
        """As `paste`, of complex numbers as pairs of real ones."""
        parent = self.parents[view]
        pairs = self.pairs(latest)
        pasted = undone_in_pairs(view, parent, pairs, self.pairs(value) if value_of(view).is_complex() else value)
        if pasted is None:
            raise Unwritable(
                f"{why.target} writes to a part of complex numbers, through which no gradient is known", why
            )
        return self.emit(aten.view_as_complex.default, (self.emit(*pasted, {}, pairs),), {}, parent)

    def pairs(self, x: fx.Node) -> fx.Node:
        """Complex numbers `x` as pairs of real ones."""
        if x.target is aten.view_as_complex.default:
            return x.args[0]
        there = self.emit(aten.resolve_conj.default, (x,), {}, x)
        pairs = self.emit(aten.view_as_real.default, (there,), {}, x)
        pairs.meta["val"] = value_of(x).new_empty((*shape_of(x), 2), dtype=value_of(x).dtype.to_real())
        return pairs

    def copy_back(self) -> None:
        """Inputs that the program changes get their last value."""
        for root in [node for node in self.now if node.op == "placeholder"]:
            copied = self.emit(aten.copy_.default, (root, self.latest(root)), {}, root)
            copied.meta[UNSEEN] = root not in self.seen

    def emit(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, tuple(args), dict(kwargs))
        new.meta = origin(like)
        new.meta["val"] = torch.empty_like(value_of(like))
        self.note_gradient(new)
        return new


def instead(graph: fx.Graph, before: fx.Node, value: fx.Node, why: fx.Node) -> fx.Node:
    """`value`, written over all of `before`: to this autograd gives a gradient of zeros, which is not none (an
    optimizer decays a weight whose gradient is zero)."""
    how = {"dtype": torch.bool, "device": value_of(before).device}
    always = graph.call_function(aten.full.default, ([], True), how)
    always.meta = {**origin(why), "val": value_of(before).new_empty((), dtype=torch.bool)}
    new = graph.call_function(aten.where.self, (always, value, before))
    new.meta = {**origin(why), "val": torch.empty_like(value_of(before))}
    return new


COMPARISONS = ("eq_", "ne_", "lt_", "le_", "gt_", "ge_")  # whose gradients are zeros
MANY = (*SPLITS, "unbind")


def part_by_part(graph: fx.Graph) -> None:
    """Views that an op gives many of, and those of `narrow`, each as a view of its own, where their memory is written
    to from there on."""
    written = set[int | None]()
    for node in reversed(graph.nodes):
        if is_write(node):
            written |= set(map(storage, written_args(node)))
        elif node.target is aten.narrow.default and storage(node.args[0]) in written:
            start = place_of(node.args[2], shape_of(node.args[0])[node.args[1]])
            node.target, node.args = aten.slice.Tensor, (*node.args[:2], start, start + node.args[3])
        elif is_aten(node) and op_name(node) in MANY and storage(node.args[0]) in written and in_order(node):
            for part in [user for user in node.users if user.target is operator.getitem]:
                part.target, part.args = cut_out(node, part.args[1])
            if not node.users:
                graph.erase_node(node)


def in_order(node: fx.Node) -> bool:
    """Whether the views follow each other: those of tensor_split may be taken back and forth, and overlap."""
    size = shape_of(node.args[0])[named(node, "dim")]
    return op_name(node) == "unbind" or same(sum(value.shape[named(node, "dim")] for value in value_of(node)), size)


def cut_out(node: fx.Node, index: int) -> tuple[Any, Any]:
    """One of the views that `node` gives, as an op and its arguments."""
    base, dim = node.args[0], named(node, "dim")
    if op_name(node) == "unbind":
        return aten.select.int, (base, dim, index)
    ends = list(accumulate((value.shape[dim] for value in value_of(node)), initial=0))
    index = place_of(index, len(ends) - 1)
    return aten.slice.Tensor, (base, dim, ends[index], ends[index + 1])


INPLACE_VIEWS = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


def views_by_value(graph: fx.Graph) -> None:
    """x.unsqueeze_(0) writes no number: who reads x from there on reads a view. Raises Unwritable for an input, which
    the caller would see with another shape."""
    for node in graph.nodes:
        if node.target in INPLACE_VIEWS:
            viewed = node.args[0]
            while is_write(viewed):
                viewed = written_args(viewed)[0]
            if viewed.op == "placeholder":
                raise Unwritable(f"{node.target} changes what an input is a view of", node)
            node.target = INPLACE_VIEWS[node.target]


def storage(node: fx.Node) -> int | None:
    """The key of the storage that a node's tensor lies in, None for another value."""
    value = value_of(node)
    return storage_key(value) if isinstance(value, torch.Tensor) else None
