"""What explain says of a program is what the backend would do, also where nothing has loaded the backend."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging, torch, ringopt
log = logging.getLogger("mine")
def attend(x):
    x = 2 * x
    log.info("words that are known")  # at which Dynamo alone ends its graph
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True) + 1
def by_integers(x):
    return attend(x / (4 // (torch.arange(3) + 2).tolist()[2]))  # nothing is divided by zero
ringopt.explain(by_integers, torch.ones(1, 2, 8, 4), world_size=2)
report = ringopt.explain(attend, torch.ones(1, 2, 8, 4), world_size=2)
print(len(report.sites), [note for note in report.notes if "graph break" in note])
"""


def test_explain_alone_knows_what_dynamo_is_taught() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["1 []"], done.stderr[-2000:]
