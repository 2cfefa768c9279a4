"""What tables of `ringopt bench` and the workers that measure them both name. Imports nothing, so --help is quick."""

from __future__ import annotations

# ---- exchange: ringopt's strategies, and torch's ring by its way of sending
OURS = ("local", "halo", "ring", "ring2", "gather", "ring_q", "gather_q", "ulysses", "auto")
TORCH = {"torch ring": "allgather", "torch ring, all-to-all": "alltoall"}

# ---- memory
STRATEGIES = ("local", "halo", "ring", "ring2", "gather", "ring_q", "gather_q", "ulysses", "merge")
PEERS = ("all-gather", *TORCH)
PATTERNS = {"full": "contiguous", "causal": "zigzag", "window(512)": "contiguous"}  # and the layout
FEW = 16  # queries that every rank has, over keys that are spread

# ---- kernels: rows of the table
RING, COPY = "ring", "copy"

# ---- overlap
PASSES = ("forward", "backward")

# ---- one-process
BACKENDS = ("ring", "inductor")

# ---- dropout, models: inner backends
INNER = ("inductor", "aot_eager", "eager")

# ---- soak
TIMEOUT = 60.0  # seconds until a message that does not arrive ends the soak


def equal_shards(length: int, ranks: int) -> bool:
    """In either layout, as the peers take them."""
    return length % (2 * ranks) == 0
