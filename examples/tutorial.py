# %% [markdown]
# # From one process to two ranks
#
# A training script of one process becomes one of two, is checked, and is planned for eight GPUs. It runs on a laptop,
# in about two minutes:
#
#     python examples/tutorial.py
#
# The same text is a notebook, `examples/tutorial.ipynb`.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringopt

# %% [markdown]
# ## A script of one process
#
# A small GPT as one writes it: attention is spelled out, with a causal mask. Nothing in it is made for ringopt. It
# trains on the harder half of the tokens, and returns its logits beside the loss, as many models do.


# %%
class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~past, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, words: int = 256, width: int = 128, heads: int = 4, layers: int = 2):
        super().__init__()
        self.words, self.rates = nn.Embedding(words, width), 10_000 ** torch.linspace(0, -1, width // 2)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.rates
        logits = self.head(self.blocks(self.words(ids) + torch.cat([angles.sin(), angles.cos()], -1)))
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return losses.topk(len(losses) // 2).values.mean(), logits


LENGTH = 1024


def batch(step: int) -> Tensor:
    """The same on every rank, for it follows from the step alone."""
    return torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(step))


def train(backend: str, options: dict[str, object] | None = None, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=backend, options=options)
    losses = []
    for step in range(steps):
        loss, _logits = compiled(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## The same on two ranks
#
# Two things are new: a process group, and the name of the backend. The model, the loop and the batches stay: every
# rank is given the whole batch, and every rank gets the whole loss and all gradients.
#
# (`aot_eager` compiles in a second; leave `inner_backend` out to have Inductor's kernels.)

# %%
OPTIONS = {"inner_backend": "aot_eager", "outputs": "lazy"}


def on_a_rank(more: dict[str, object]) -> None:
    dist.init_process_group("gloo")
    with ringopt.record_traffic() as traffic:
        losses = train("ring", {**OPTIONS, **more})
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "sent": traffic.bytes_sent}))
    dist.destroy_process_group()


if dist.is_torchelastic_launched():  # this file was started by torchrun, below
    on_a_rank(json.loads(sys.argv[1]))
    sys.exit()

# %% [markdown]
# `torchrun` starts this file twice. From a shell it is one line: `torchrun --nproc-per-node 2 tutorial.py '{}'`. Rank 0
# says what was sharded: `ringopt: 2 of 2 attentions, 100% of matrix work on shards, 2 ranks`.

# %%
FILE = globals().get("__file__", "tutorial.py")


def two_ranks(**more: object) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", FILE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # or torchrun sets it, and says so
    done = subprocess.run([*command, json.dumps(more)], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


alone, ranks = train("aot_eager"), two_ranks()
for step, (one, two) in enumerate(zip(alone, ranks["losses"], strict=True)):
    print(f"step {step}: loss {one:.7f} on one process, {two:.7f} on two ranks")
assert all(abs(one - two) < 1e-5 * one for one, two in zip(alone, ranks["losses"], strict=True))

# %% [markdown]
# ## What the report says
#
# `ringopt.explain` is a dry run in this process, for any number of ranks: what was sharded, what was not and why,
# what a rank sends, what it holds. Both attentions were found, though nobody called SDPA. The mask is known to be
# causal, so the layout is zigzag, in which every rank has as much to compute. K and V go round a ring, and all of the
# matrix work is on shards.
#
# `report.text(verbose=True)` has every attention, all-gather and note. In a run, `TORCH_LOGS="ringopt"` prints the
# report, and `ringopt.reports()` returns it.

# %%
report = ringopt.explain(GPT(), batch(0), world_size=2)
print(report)

# %% [markdown]
# ## What to do about a gather
#
# What is needed whole is gathered, and the report has the op, the line and the bytes.

# %%
for gather in report.gathers:
    print(f"{gather.op}: {gather.bytes:,} bytes, {gather.why}\n    {gather.source}")

# %% [markdown]
# - `topk` orders the losses of all tokens. It is 4 bytes a token: leave it.
# - The logits are returned, so they are gathered: 256 numbers a token here, 100,000 in a real model. Nobody reads them
#   in this loop. `outputs="lazy"` gathers them only when somebody does, which `OPTIONS` has above. Of the two gathers
#   one is left:

# %%
lazy = ringopt.explain(GPT(), batch(0), world_size=2, options={"outputs": "lazy"})
print([gather.op for gather in lazy.gathers], "is gathered;", [output.name for output in lazy.outputs], "is not")
print(f"{report.bytes_sent:,} bytes sent in a forward before, {lazy.bytes_sent:,} after")

# %% [markdown]
# For what remains: write the op so that it keeps tokens apart, or compute it on fewer numbers (a mean before a sort),
# or leave it where it is small. `on_refusal="error"` ends a program whose attention would not be sharded.
#
# ## Verify
#
# With `verify=True` the first call also runs the program as it was, whole, and compares outputs and gradients. A
# difference is an error on all ranks. It takes the memory of one process: use it at a length that one process can hold.

# %%
verified = two_ranks(verify=True)
print("verified; losses", verified["losses"])

# %% [markdown]
# ## A plan for eight H100
#
# `ringopt.plan` predicts memory, bytes and time for lengths, ranks and hardware that are not at hand, from a few traces
# of the program at a small size. Nothing of it has been measured on a GPU.

# %%
plan = ringopt.plan(GPT(), batch(0), world_size=8, hardware="h100", lengths=[1 << 16, 1 << 20])
print(plan)

# %% [markdown]
# ## What was done to the program
#
# A diff matches the nodes of two programs. Here: the exported program, and what `ringopt.convert` makes of it, a
# program for any number of ranks.

# %%
program = torch.export.export(GPT(), (batch(0),))
converted = ringopt.convert(program)
diff = ringopt.diff(program, converted, world_size=2)
print(diff)

# %% [markdown]
# As a page to look through, with the masks as pictures: write both to files, and compare these.

# %%
folder = Path(tempfile.mkdtemp(prefix="ringopt-"))
torch.export.save(program, folder / "before.pt2")
torch.export.save(converted, folder / "after.pt2")
command = [sys.executable, "-m", "ringopt.tools.cli", "diff", "before.pt2", "after.pt2", "--stat"]
subprocess.run([*command, "--html", "diff.html"], cwd=folder, stdout=subprocess.DEVNULL, check=False)  # 1: they differ
print(f"{folder / 'diff.html'}: {(folder / 'diff.html').stat().st_size:,} bytes; open it in a browser")

# %% [markdown]
# ## Where to go on
#
# - An own model: `ringopt explain my_file:factory`, where `factory()` returns `(model, inputs)`.
# - All options, the Trainer, DDP and FSDP: REFERENCE.md.
# - Whole scripts: `train_llama.py`, `train_trainer.py`, `train_restart.py`, `longnet.py`.
