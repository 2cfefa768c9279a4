"""`verify=True`: what was compiled is held against the program it was made from, before its first result is returned.

    found    = compiled(copies of the inputs), and the gradients of random cotangents
    expected = the program as Dynamo gave it, whole on every rank, with the same inputs and cotangents; one that draws
               random numbers by position draws the same (ringopt/drivers/reference.py), not compiled further
    result   = compiled(inputs)

It works on copies, so buffers, gradients and generators are those of one call. A value may differ by what its dtype
allows, or by ten times what the program itself moves by when its inputs are rounded anew (where a router chooses
another expert): rounding is no error of a compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.compare.hooked_graph import LEAST, cotangent, random_like
from ringopt.compare.node_values import allowed_of, generator_states, largest_difference, restore_generators
from ringopt.distributed.mesh import Mesh
from ringopt.errors import VerificationError
from ringopt.hardware.precision import rounds_float32
from ringopt.ir.nodes import draws_by_stream
from ringopt.ir.placement import Spread
from ringopt.output.printable import logger, summary_logger
from ringopt.tensor.lazy import Lazy, cut, spread, whole
from ringopt.torch_compat.autograd import no_autocast, unseen
from ringopt.torch_compat.fake_tensors import FakeTensor
from ringopt.torch_compat.tensors import is_traceable_wrapper_subclass

log = logger(__name__)

ROUNDINGS = 10
SHOWN = 4  # values that differ and are told

GRADIENT = "the gradient of "

Values = dict[str, Any]


class Original:
    """The graph before anybody compiled it, with `names` of its inputs."""

    def __init__(self, program: fx.GraphModule, names: Sequence[str]):
        graph = fx.Graph()  # a copy: whoever compiles the program edits it
        graph.output(graph.graph_copy(program.graph, {}))
        self.run, self.names = fx.GraphModule(program, graph), tuple(names)
        self.dtypes, self.outputs = dtypes_of(program), _output_names(program)
        self.draws, self.found = False, ""

    def drawn_by_position(self, program: fx.GraphModule, found: str) -> None:
        """It draws random numbers by position: `program` has the same. `found`: what of it is as passes have found
        it, "" where all is as written. (The graph before anybody compiled it draws by torch's own stream.)"""
        self.run, self.found = program, found
        self.draws = not any(map(draws_by_stream, program.graph.nodes))


@dataclass(frozen=True)
class GivenLeaves:
    """Of one run: what a graph is `given`, and the `leaves` that this was made of, which have the gradients."""

    given: Sequence[Any]
    leaves: Sequence[Any]


class ByNode(Protocol):
    """What compares each node (ringopt/runtime/verify_nodes.py). `taken`: inputs of which a rank takes its rows."""

    @property
    def taken(self) -> Collection[int]: ...

    def first_off(
        self, whole: Callable[[float], GivenLeaves], own: Callable[[], GivenLeaves], bound: float, eps: float
    ) -> tuple[object | None, int]: ...


class Verified:
    """`run`, whose first call is compared with `original`: outputs, inputs that are written, and gradients.

    `local` has the outputs that are this rank's rows; `averaged` the inputs whose gradients are to be averaged over the
    ranks; `nodes` compares each node too. Raises VerificationError on every rank alike.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        original: Original,
        mesh: Mesh,
        local: Mapping[int, Spread],
        averaged: Collection[int],
        nodes: ByNode | None = None,
    ):
        self.run, self.original, self.mesh, self.local, self.averaged = run, original, mesh, local, averaged
        self.nodes = nodes
        self.asked = False

    def __call__(self, *inputs: Any) -> Any:
        if not self.asked and not any(isinstance(x, FakeTensor) for x in inputs):
            before = generator_states()
            try:
                with unseen():
                    self.verify(inputs)
            finally:
                restore_generators(before)
            self.asked = True
        return self.run(*inputs)

    def verify(self, inputs: Sequence[Any]) -> None:
        if any(is_traceable_wrapper_subclass(x) and not isinstance(x, Lazy) for x in inputs):
            log.warning("verify: nothing was compared, for tensors that are spread by others (DTensor) come in")
            return
        before = generator_states()
        found = self.values(inputs, compiled=True)
        after = generator_states() if self.original.draws else before
        restore_generators(before)
        expected = self.values(inputs)
        if not all(map(torch.equal, after, generator_states())):
            log.warning(
                "verify: nothing was compared, for the program draws random numbers (dropout) by torch's own stream, "
                "and ranks draw others than one process does. Verify it with options={'random': 'position'}, with "
                "dropout 0, or after model.eval()"
            )
            return
        if self.original.found:
            log.warning(
                "verify: the graph draws random numbers, and %s, so it is compared with a graph in which the same "
                "passes have found that: whether it was found rightly is not compared. Verify it with dropout 0 too, "
                "or after model.eval()",
                self.original.found,
            )
        dtypes = self.original.dtypes | ambient(inputs)
        bound, eps = max(map(allowed_of, dtypes), default=0.0), max((torch.finfo(x).eps for x in dtypes), default=0.0)
        allowed = dict.fromkeys(expected, bound)
        apart = self.over_ranks(distances(found, expected))
        if any(error > allowed[name] for name, (error, _) in apart.items()):
            restore_generators(before)
            rounded = distances(self.values(inputs, shaken=eps), expected)
            allowed = {name: max(bound, ROUNDINGS * rounded[name]) for name, bound in allowed.items()}
        wrong = [Apart(name, *found, allowed[name]) for name, found in apart.items() if not found[0] <= allowed[name]]
        restore_generators(before)
        by_node = self.by_node(inputs, bound, eps, bool(wrong)) if self.nodes is not None else ""
        if wrong:
            raise VerificationError(_error_text(wrong, len(expected), by_node))
        sentence = "verify: %d values agree with the program as written, the largest error is %.1e"
        largest = max(error for error, _ in apart.values())
        (log if self.mesh.rank else summary_logger()).info(sentence, len(apart), largest)

    def by_node(self, inputs: Sequence[Any], bound: float, eps: float, wrong: bool) -> str:
        """Where what is `wrong` begins, as a sentence. Of a node that is off while results are right there is a
        warning: nobody reads what is off of it, such as rows of padding."""
        nodes = self.nodes
        assert nodes is not None
        own = self.own(inputs, nodes.taken)
        off, compared = nodes.first_off(lambda shaken: self.whole(inputs, shaken), lambda: own, bound, eps)
        if off is None:
            log.info("verify: %d values and gradients of nodes agree", compared)
            return (
                f" All {compared} values and gradients of nodes agree where the graph runs op by op, so the difference "
                "is made by what compiles it (option inner_backend)."
            )
        if not wrong:
            log.warning("verify: results agree, and yet a node differs in what nobody reads of it: %s", off)
        return f" The first node that differs: {off}."

    def whole(self, inputs: Sequence[Any], shaken: float) -> GivenLeaves:
        """Copies for the original program, with numbers rounded anew to so much of each."""
        leaves = copies(inputs, rows=False)
        if shaken:
            leaves = [perturbed(x, shaken, seed) for seed, x in enumerate(leaves)]
        return GivenLeaves(_writable(leaves, inputs), leaves)

    def own(self, inputs: Sequence[Any], taken: Collection[int]) -> GivenLeaves:
        """Copies for the sharded graph itself: of the inputs `taken` this rank's rows."""
        both = zip(copies(inputs, rows=True), copies(inputs, rows=False), strict=True)
        leaves = [one if i in taken else other for i, (one, other) in enumerate(both)]
        return GivenLeaves(_writable(leaves, inputs), leaves)

    def values(self, inputs: Sequence[Any], compiled: bool = False, shaken: float = 0.0) -> Values:
        """What the compiled program or the original returns and writes, and the gradients, by name."""
        leaves = copies(inputs, compiled)
        if shaken:
            leaves = [perturbed(x, shaken, seed) for seed, x in enumerate(leaves)]
        given = [_sharded_again(leaf, x) if compiled else leaf for leaf, x in zip(leaves, inputs, strict=True)]
        given = _writable(given, inputs)
        run = self.run if compiled else self.original.run
        made = [_gathered(out) for out in run(*given)]
        rows = self.local if compiled else {}
        gradients = self.gradients(made, leaves, rows) if torch.is_grad_enabled() else []
        values = dict(zip(self.original.outputs, made, strict=True))
        if not compiled:
            values |= {self.original.outputs[i]: cut(how, made[i]) for i, how in self.local.items()}
        for name, x, old in zip(self.original.names, given, inputs, strict=True):
            if isinstance(x, Tensor) and not isinstance(old, Lazy):
                values[f"{name} after the call"] = x
        for i, gradient in gradients:
            if compiled and i in self.averaged:
                gradient = self.mesh.all_reduce(gradient) / self.mesh.size
            how = inputs[i].shard.spread if isinstance(inputs[i], Lazy) and not compiled else None
            values[f"{GRADIENT}{self.original.names[i]}"] = cut(how, gradient) if how is not None else gradient
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in values.items()}

    def gradients(
        self, outputs: Sequence[Any], leaves: Sequence[Any], rows: Mapping[int, Spread]
    ) -> list[tuple[int, Tensor]]:
        """Of every leaf that has one, by place. Cotangents have length 1: an output counts as much as another."""
        wanted = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        given = [(i, x) for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if not wanted or not given:
            return []
        cotangents = [
            cut(rows[i], cotangent(rows[i].size, x)) if i in rows else cotangent(x.shape, x) for i, x in given
        ]
        with no_autocast():
            found = torch.autograd.grad(
                [x for _, x in given], [x for _, x in wanted], cotangents, allow_unused=True, materialize_grads=True
            )
        return [(i, gradient) for (i, _), gradient in zip(wanted, found, strict=True)]

    def over_ranks(self, errors: Mapping[str, float]) -> dict[str, tuple[float, int]]:
        """The largest error of each value, and the rank that has it; the same on all ranks."""
        mine = torch.tensor(list(errors.values()), dtype=torch.float64, device=self.mesh.device)
        every = self.mesh.all_gather(mine, "verify")
        largest = torch.stack(every).max(0)
        return dict(zip(errors, zip(largest.values.tolist(), largest.indices.tolist(), strict=True), strict=True))


# ---- inputs ----------------------------------------------------------------------------------------------------------
def copies(inputs: Sequence[Any], rows: bool) -> list[Any]:
    """Leaves with the numbers of `inputs`; what shares memory shares it again. Of lazy tensors the `rows`, or the
    whole."""
    memo: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, Lazy):
            own = x.shard.rows.detach().clone()
            plain = own if rows else _gathered(spread(own, x.shard.spread)).detach()
        else:
            plain = copy.deepcopy(x.detach(), memo)
        return plain.requires_grad_(x.requires_grad)

    return [copied(x) for x in inputs]


def perturbed(leaf: Any, eps: float, seed: int) -> Any:
    """A leaf whose numbers are others by about a rounding error, alike on all ranks."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    other = leaf.detach() * (1 + eps * random_like(leaf.shape, leaf, seed))
    return other.requires_grad_(leaf.requires_grad)


def _writable(values: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """What is written must not be a leaf; what is a leaf to the caller is not written."""
    return [x.clone() if _has_history(old) else x for x, old in zip(values, inputs, strict=True)]


def _gathered(x: Any) -> Any:
    return whole(x) if isinstance(x, Lazy) else x


def _sharded_again(leaf: Any, x: Any) -> Any:
    return spread(leaf, x.shard.spread) if isinstance(x, Lazy) else leaf


def _has_history(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, Lazy) and not x.is_leaf


# ---- what may differ -------------------------------------------------------------------------------------------------
def dtypes_of(program: fx.GraphModule) -> set[torch.dtype]:
    """In which the program computes, its regions included."""
    graphs = [part.graph for part in program.modules() if isinstance(part, fx.GraphModule)]
    found = (node.meta.get("example_value") for graph in graphs for node in graph.nodes)
    return {x.dtype.to_real() for x in found if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())}


def _output_names(program: fx.GraphModule) -> list[str]:
    outputs = program.graph.output_node().args[0]
    return [f"output {i} ({out})" for i, out in enumerate(outputs)]


def ambient(inputs: Sequence[Any]) -> set[torch.dtype]:
    """Dtypes that settings around the call make it compute in: autocast, and matrix products in fewer digits."""
    devices = {x.device.type for x in inputs if isinstance(x, Tensor)} - {"meta"}
    found = {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    return found | ({torch.bfloat16} if any(map(rounds_float32, devices)) else set())


def distances(found: Values, expected: Values) -> dict[str, float]:
    """Relative to the largest element; infinite where sizes, dtypes or anything but numbers differ."""
    gradients = [x for name, x in expected.items() if name.startswith(GRADIENT)]
    least = LEAST * max((float(x.abs().max()) for x in gradients if x.numel()), default=0.0)
    return {
        name: relative_distance(found.get(name), value, least if name.startswith(GRADIENT) else 0.0)
        for name, value in expected.items()
    }


def relative_distance(one: Any, other: Any, least: float) -> float:
    """The largest difference of two results over the largest finite magnitude of the second, at least `least`.
    0 for equal values (NaN equals NaN), inf for another type, shape or dtype, or unequal integers."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return 0.0 if type(one) is type(other) and one == other else inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return inf
    if torch.equal(one, other):
        return 0.0
    if not other.is_floating_point() and not other.is_complex():
        return inf
    worst, largest = largest_difference(one, other)
    return worst / max(largest, least, 1e-300) if worst else 0.0


@dataclass(frozen=True)
class Apart:
    """A value that differs: `error` is relative to its largest element, on the rank where that is largest."""

    name: str
    error: float
    rank: int
    allowed: float

    def __str__(self) -> str:
        much = "in size, dtype or value" if self.error == inf else f"by {self.error:.1e} of its largest element"
        return f"{self.name} {much} on rank {self.rank} (allowed: {self.allowed:.0e})"


def _error_text(wrong: Sequence[Apart], compared: int, by_node: str = "") -> str:
    furthest = sorted(wrong, key=lambda apart: -apart.error)
    shown = "; ".join(map(str, furthest[:SHOWN])) + ("; ..." if len(wrong) > SHOWN else "")
    return (
        f"verify: {len(wrong)} of {compared} values differ from those of the original program: {shown}.{by_node} Its "
        "results must not be used. Compile with backend='inductor' meanwhile, and report it with what "
        "options={'dump': folder} writes"
    )
