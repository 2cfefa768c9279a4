"""Train a byte-level Llama on the source of Python's standard library, one sequence spread over the ranks.

    torchrun --nproc-per-node 2 examples/train_llama.py

Every rank is given the whole batch and gets the whole loss and all gradients: `train` is the training loop of one
device, but for the two lines marked. Afterwards the same steps run in one process and both are compared.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from _report import Run, compare, dump, single_process
from rich.console import Console
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM

import ringopt

# The ranks add the same float32 numbers in another order. Single-process runs that differ only in that (eager and
# inductor, one thread and two) stay within 2e-7 of each other over 5 steps and over 40, while one token of 4096 left
# out of the loss moves it by about 1/4096 = 2e-4. The bound lies between, relative to the loss.
BOUND = 1e-5


def build(length: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(length: int, steps: int) -> list[torch.Tensor]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: length * steps]
    return list(torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(steps, 1, length))


def train(length: int, steps: int, backend: str, quiet: bool) -> Run:
    model = build(length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    compiled = torch.compile(model, backend=backend)  # the backend's name
    with Progress(console=Console(stderr=True), disable=quiet) as progress, Run().measured() as run:
        bar = progress.add_task(f"{backend}: compiling", total=steps)
        for ids in batches(length, steps):
            with run.step():
                loss = compiled(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            run.losses.append(loss.item())
            progress.update(bar, advance=1, description=f"{backend}: loss {run.losses[-1]:.4f}")
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence (default 4096)")
    parser.add_argument("--steps", type=int, default=5, help="training steps, at least 2 (default 5)")
    parser.add_argument("--single", action="store_true", help="only the single-process run; its figures as JSON")
    args = parser.parse_args()
    if args.single:
        print(dump(train(args.length, args.steps, "inductor", quiet=False)))
        return 0
    if args.steps < 2 or not dist.is_torchelastic_launched():
        parser.error(f"needs torchrun (see above) and --steps of at least 2, not {args.steps}")

    dist.init_process_group("gloo")  # the process group
    rank, runs = dist.get_rank(), [Run()] * dist.get_world_size()
    dist.all_gather_object(runs, train(args.length, args.steps, "ring", quiet=rank != 0))
    dist.destroy_process_group()
    if rank != 0:
        return 0
    for report in ringopt.reports():
        Console().print(report)
    return 0 if compare(runs, single_process(__file__, sys.argv[1:]), BOUND) else 1


if __name__ == "__main__":
    sys.exit(main())
