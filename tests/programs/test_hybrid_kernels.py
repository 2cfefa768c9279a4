"""Hybrids of transformers where fla, mamba-ssm and causal-conv1d are installed, as on GPUs: transformers takes their
kernels, and tokens stay on shards all the same. The libraries are stand-ins, and a process of its own imports them
before the models."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

KERNELS = {
    "chunk_gated_delta_rule": ("qwen3_next", "qwen3_5_text", "olmo_hybrid"),
    "chunk_kda": ("kimi_linear", "bailing_hybrid"),
    "mamba_chunk_scan_combined": ("mamba2", "bamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"),
}
# Do not tell their kernels of packed sequences (transformers 5.23).
UNPACKED = ("kimi_linear", "bailing_hybrid", "mamba2")


@pytest.mark.zoo
@pytest.mark.parametrize("packed", ["one sequence", "packed"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_they_stay_on_their_shards(kernel: str, packed: str) -> None:
    command = [sys.executable, "-m", __spec__.name, packed, *KERNELS[kernel]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [found["name"] for found in lines] == list(KERNELS[kernel])
    for found in lines:
        assert found["wrong"] == "" and found["gathers"] == ["output"] and found["share"] >= 0.95, found
        scans = [site for site in found["sites"] if site[0] == "scan"]
        assert scans and all(site[1] in ("states", "heads") for site in scans), found
        assert {site[2] for site in scans} == {f"ringopt_kernels::{kernel}"}, found
        notes = sum("packs sequences" in note for note in found["notes"])
        assert notes == (len(scans) if packed == "packed" and found["name"] not in UNPACKED else 0), found


def collated(given: dict[str, Any]) -> dict[str, Any]:
    """Three sequences in one, as transformers' DataCollatorWithFlattening gives them."""
    import torch

    sizes = torch.tensor([33, 31, 26])
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
    made = {name: x[:1] for name, x in given.items()}
    made["position_ids"] = torch.cat([torch.arange(size) for size in sizes.tolist()])[None]
    made |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 33, "max_length_k": 33}
    return {**made, "seq_idx": torch.repeat_interleave(sizes)[None].int()}


def main(packed: str, *names: str) -> None:
    """A line for each model."""
    from tests.harness.stub_libraries import libraries

    with libraries():
        from torch.nn.attention import SDPBackend, sdpa_kernel

        import ringopt.backend  # noqa: F401  (teaches Dynamo)
        from tests.harness.translation import captured_graphs, validate_graph
        from tests.zoo.hybrid_models import build
        from tests.zoo.outcomes import in_float64

        for name in names:
            model, keywords = build(name, 90)
            keywords = collated(keywords) if packed == "packed" else keywords
            (graph,) = captured_graphs(model, (), keywords, fullgraph=True)
            with sdpa_kernel(SDPBackend.MATH):
                verdict = validate_graph(2, *in_float64(*graph), 1e-10)
            report = verdict.report
            found: dict[str, Any] = {"name": name, "wrong": verdict.wrong, "share": report.sharded_fraction}
            found["sites"] = [[site.form, site.strategy, site.kernel] for site in report.sites]
            found["notes"] = [note for site in report.sites for note in site.notes]
            print(json.dumps({**found, "gathers": sorted({gather.op for gather in report.gathers})}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
