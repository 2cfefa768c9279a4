"""What a user may choose: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_type_hints

from ringopt.errors import OptionError

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
    on_refusal      what happens when an attention site cannot be sharded
    verify          whether the first call of each compiled graph also runs the graph it was made from, whole on every
                    rank, and compares outputs and gradients (ringopt/runtime/verify.py)
    dump            folder for the graphs before and after each pass, the report and the diff; None: nothing is written
    trace           folder for what each rank did when, exchanges and compute; None: nothing is recorded
    disable_passes  names of passes that are not run; only those that no number depends on (`ringopt passes` lists them)
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
    verify: bool = False
    dump: str | None = None
    trace: str | None = None
    disable_passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in _literals().items():
            value, allowed = getattr(self, name), get_args(kind)
            if value not in allowed:
                raise OptionError(f"option {name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        for name in ("sync_gradients", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"option {name}={getattr(self, name)!r}: expected True or False")
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
    def of(cls, options: Mapping[str, Any] | Options | None) -> Options:
        """From the `options` of torch.compile. Raises OptionError that lists the known names."""
        if isinstance(options, Options):
            return options
        known = [field.name for field in dataclasses.fields(cls)]
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options={options!r}: expected a dict; the options are {', '.join(known)}")
        unknown = sorted(repr(name) for name in options or {} if name not in known)
        if unknown:
            raise OptionError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(**(options or {}))


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
