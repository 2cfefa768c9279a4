"""What a user may choose: one frozen dataclass, checked when it is made.

An option is, in this order: what `options={...}` of the call says; what the innermost `ringopt.defaults` says; what the
environment variable RINGOPT_OPTIONS says, a JSON object; built in. The second and third are for libraries that call
`torch.compile(..., backend="ring")` and pass no options. They are asked when a graph is compiled, which is at the first
call of a compiled function, not where `torch.compile` stands. The report names those that came from outside.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_type_hints

from ringopt.errors import OptionError, meant

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Shard = Literal["model", "attention"]
Strategy = Literal["auto", "local", "halo", "gather", "ring", "ring2", "gather_q", "ring_q", "ulysses", "hybrid"]
LayoutName = Literal["auto", "contiguous", "zigzag"]
Inputs = Literal["global", "local"]
CheckInputs = Literal["every", "first", "always", "never"]
Outputs = Literal["gather", "lazy", "local"]
KernelName = Literal["auto", "flash", "cudnn", "efficient", "flash_cpu", "math"]
InnerBackend = Literal["inductor", "aot_eager", "eager"]
DilationOffsets = Literal["paper", "torchscale"]
Random = Literal["position", "torch"]
OnRefusal = Literal["warn", "error", "ignore"]

LONGEST = 10**9  # seconds: 30 years, of which a process group still makes a deadline


@dataclass(frozen=True)
class Options:
    """Options of `torch.compile(model, backend="ring", options={...})`.

    mesh            1-D DeviceMesh over which the sequence is sharded; None: all ranks of the default process group
    shard           "model": everything between the attention sites is spread over the ranks too; "attention": only the
                    sites are, the rest is computed whole on every rank
    strategy        how rows reach the ranks that need them; "auto" lets ringopt choose per site
    layout          which rows a rank holds; "auto" takes zigzag where a causal site gains balance from it
    inputs          "global": every rank passes whole inputs; "local": its rows of those that carry the sequence, each
                    as ringopt.from_rows makes it, which says along which dim they are cut
    check_inputs    when the inputs are compared over the ranks, for every rank must pass the same full batch: "first",
                    byte by byte at the first call; "every", and digests of the batch at each one that follows;
                    "always", byte by byte at each, parameters too
    outputs         what is returned of values whose rows are spread: "gather" whole tensors; "lazy" ones that are
                    gathered when they are read, by all ranks alike; "local" this rank's rows of them
    sync_gradients  True: every rank has the complete gradients of parameters; False: their mean over the ranks is the
                    gradient, for a wrapper that averages (DDP or FSDP over the ranks of the mesh too)
    kernel          the attention kernel of a block
    segment_lengths, dilation_rates   make each self-attention dilated
                    (ringopt/context_parallel/geometry/dilation.py): another function than the
                    model's own; None: they stay as they are
    dilation_offsets   where the heads begin in a segment: "paper" (j mod r) or "torchscale" (j // ceil(heads / r))
    random          "position": random numbers follow from the position of each element and a seed, so they are equal on
                    any number of ranks (ringopt/ops/draws.py); "torch": they are those of torch's own stream, which on
                    shards is another on each rank
    inner_backend   what compiles the sharded graph
    timeout         seconds until a message that does not arrive is an error
    on_refusal      what happens when an attention site cannot be sharded, or Dynamo makes no graph of a function that
                    computes some
    verify          whether the first call of each compiled graph also runs the graph it was made from, whole on every
                    rank, and compares outputs and gradients (ringopt/runtime/verify.py); "nodes": and the value and
                    gradient of each node (ringopt/runtime/verify_nodes.py)
    dump            folder for the graphs before and after each pass, the report and the diff; None: nothing is written
    trace           folder for what each rank did when, exchanges and compute; None: nothing is recorded
    disable_passes  names of passes that are not run; only those that no number depends on (`ringopt passes` lists them)

    `outside` is no option: by name, those that were not chosen by the call, and where they were.
    """

    mesh: DeviceMesh | None = None
    shard: Shard = "model"
    strategy: Strategy = "auto"
    layout: LayoutName = "auto"
    inputs: Inputs = "global"
    check_inputs: CheckInputs = "every"
    outputs: Outputs = "gather"
    sync_gradients: bool = True
    kernel: KernelName = "auto"
    segment_lengths: tuple[int, ...] | None = None
    dilation_rates: tuple[int, ...] | None = None
    dilation_offsets: DilationOffsets = "paper"
    random: Random = "position"
    inner_backend: InnerBackend = "inductor"
    timeout: float = 600.0
    on_refusal: OnRefusal = "warn"
    verify: bool | Literal["nodes"] = False
    dump: str | None = None
    trace: str | None = None
    disable_passes: tuple[str, ...] = ()
    outside: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in _literals().items():
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise OptionError(f"option {name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        for name, more in (("sync_gradients", ()), ("verify", ("nodes",))):
            if not isinstance(getattr(self, name), bool) and getattr(self, name) not in more:
                expected = " or ".join(map(repr, (*more, True, False)) if more else ("True", "False"))
                raise OptionError(f"option {name}={getattr(self, name)!r}: expected {expected}")
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if not number or not 0 < self.timeout <= LONGEST:
            raise OptionError(
                f"option timeout={self.timeout!r}: expected a number of seconds above 0, at most {LONGEST:,}"
            )
        for name, folder in (("dump", self.dump), ("trace", self.trace)):
            if folder is not None and not (isinstance(folder, str) and folder):
                raise OptionError(f"option {name}={folder!r}: expected the path of a folder, as text")
        names = self.disable_passes
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise OptionError(f"option disable_passes={names!r}: expected a tuple of names of passes")
        object.__setattr__(self, "disable_passes", tuple(names))
        if self.mesh is not None:
            check_mesh(self.mesh, "option mesh")
        if self.dilates:
            check_dilation(self.segment_lengths, self.dilation_rates, self.dilation_offsets)
            for name in ("segment_lengths", "dilation_rates"):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def dilates(self) -> bool:
        """Whether self-attention is to become dilated."""
        asked = self.segment_lengths is not None or self.dilation_rates is not None
        return asked or self.dilation_offsets != "paper"

    @classmethod
    def names(cls) -> list[str]:
        """Of all options."""
        return [each.name for each in dataclasses.fields(cls) if each.name != "outside"]

    @classmethod
    def of(cls, options: Mapping[str, Any] | Options | None) -> Options:
        """From the `options` of torch.compile. Raises OptionError that lists the known names."""
        if isinstance(options, Options):
            return options
        cls.check_names(options)
        return cls(**(options or {}))

    @classmethod
    def check_names(cls, options: Mapping[str, Any] | None) -> None:
        """Raises OptionError that lists the known names."""
        known = cls.names()
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options={options!r}: expected a dict; the options are {', '.join(known)}")
        unknown = sorted((name for name in options or {} if name not in known), key=repr)
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise OptionError(
                f"unknown option {names}; the options are {', '.join(known)}{meant(str(unknown[0]), known)}"
            )


VARIABLE = "RINGOPT_OPTIONS"

_in_force: list[defaults] = []


class defaults:  # a function to its users, as torch.set_grad_enabled is
    """`ringopt.defaults(outputs="lazy")` sets options for all that is compiled from now on in this process; as a
    context manager, `with ringopt.defaults(mesh=mesh["cp"]):`, until its end. What it does not name is as it was.
    Raises OptionError, as `torch.compile` does for its options, and then nothing is changed."""

    def __init__(self, **options: Any) -> None:
        Options.of(options)
        self.options = options
        _in_force.append(self)

    def __enter__(self) -> None:
        if self not in _in_force:
            raise OptionError("these ringopt.defaults have ended; call ringopt.defaults(...) again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """What was in force before is in force again; defaults that were set since stay."""
        if self in _in_force:
            _in_force.remove(self)


def with_defaults(options: Mapping[str, Any] | Options | None) -> Options:
    """The `options` of a call, and from outside those that it does not name; an `Options` names all. Raises
    OptionError."""
    if isinstance(options, Options):
        return options
    Options.check_names(options)
    chosen, sources = dict[str, Any](), dict[str, str]()
    layers = [(f"environment variable {VARIABLE}", of_environment())]
    layers += [("ringopt.defaults", each.options) for each in _in_force]
    for source, given in layers:
        chosen.update(given)
        sources.update(dict.fromkeys(given, source))
    named = options or {}
    outside = {name: source for name, source in sources.items() if name not in named}
    if not outside:
        return Options(**named)
    try:
        return Options(**{**chosen, **named}, outside=outside)
    except OptionError as error:  # each was right by itself
        origin = "; ".join(f"{name} is from {source}" for name, source in outside.items())
        raise OptionError(f"{error} ({origin})") from error


def of_environment() -> dict[str, Any]:
    """What RINGOPT_OPTIONS holds. Raises OptionError."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    wanted = 'set it to a JSON object such as {"outputs": "lazy"}, or unset it'
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"environment variable {VARIABLE}={text!r} is no JSON ({error}): {wanted}") from error
    if not isinstance(given, dict):
        raise OptionError(f"environment variable {VARIABLE}={text!r} is no JSON object: {wanted}")
    if given.get("mesh") is not None:
        raise OptionError(
            f"environment variable {VARIABLE} names a mesh ({given['mesh']!r}), which text cannot: call "
            "ringopt.defaults(mesh=...) in the program, or leave it out for all ranks"
        )
    try:
        Options.of(given)
    except OptionError as error:
        raise OptionError(f"environment variable {VARIABLE}: {error}") from error
    return given


def note_of(options: Options) -> str | None:
    """Of those from outside, for a report: which, and from where."""
    if not options.outside:
        return None
    each = []
    for name, source in options.outside.items():
        value = getattr(options, name)
        shown = "a DeviceMesh" if name == "mesh" and value is not None else repr(value)
        each.append(f"{name}={shown} ({source})")
    return f"options from outside of the call: {', '.join(each)}"


class SiteOptions(Protocol):
    """The options by which one attention site is planned."""

    @property
    def strategy(self) -> Strategy: ...

    @property
    def layout(self) -> LayoutName: ...

    @property
    def kernel(self) -> KernelName: ...


def _literals() -> dict[str, Any]:
    hints = get_type_hints(Options, localns={"DeviceMesh": object})
    return {name: kind for name, kind in hints.items() if getattr(kind, "__origin__", None) is Literal}


def check_dilation(segment_lengths: Any, dilation_rates: Any, offsets: str) -> None:
    """Of options, arguments and modules alike. Raises OptionError."""
    asked = f"segment_lengths={segment_lengths!r}, dilation_rates={dilation_rates!r}"
    for numbers in (segment_lengths, dilation_rates):
        whole = isinstance(numbers, (tuple, list)) and all(type(x) is int and x > 0 for x in numbers)
        if not whole or not numbers:
            raise OptionError(f"{asked}: both are tuples of whole numbers, 1 or more")
    if len(segment_lengths) != len(dilation_rates):
        raise OptionError(
            f"{asked}: {len(segment_lengths)} lengths and {len(dilation_rates)} rates; every segment length needs its "
            "dilation rate"
        )
    for w, r in zip(segment_lengths, dilation_rates, strict=True):
        if r > w:
            raise OptionError(f"{asked}: rate {r} is above its segment length {w}, so some heads would keep no row")
    if offsets not in get_args(DilationOffsets):
        known = ", ".join(map(repr, get_args(DilationOffsets)))
        raise OptionError(f"dilation_offsets={offsets!r}: expected one of {known}")


def check_mesh(mesh: Any, what: str) -> None:
    """Of an option and an argument alike; `what` it is. Raises OptionError."""
    dims = getattr(mesh, "ndim", None)
    if dims is None or not hasattr(mesh, "get_group"):
        raise OptionError(f"{what}={mesh!r}: expected a torch.distributed DeviceMesh")
    if dims != 1:
        raise OptionError(
            f"{what} has {dims} dims {mesh.mesh_dim_names}: the sequence is sharded over one; pass a slice of it, "
            'such as mesh["cp"]'
        )
    if mesh.get_coordinate() is None:
        raise OptionError(f"{what} holds ranks {mesh.mesh.tolist()}, and this rank is not among them")
