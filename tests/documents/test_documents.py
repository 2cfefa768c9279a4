"""The code of README, on two ranks as it stands; and the tutorial, as a script and as a notebook."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import ringopt
from tests.documents.notebook import EXAMPLES, NOTEBOOK, SCRIPT, Cell, cells, run

README = (Path(__file__).parents[2] / "README.md").read_text()


def llama() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config), torch.randint(32, (1, 21))


def run_readme() -> tuple[float, list[Tensor]]:
    """Loss and gradients of its first block, but that the ranks of the tests have their process group already."""
    [code, *_] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    model, ids = llama()
    names: dict[str, Any] = {"model": model, "ids": ids}
    fast = ringopt.defaults(inner_backend="aot_eager")  # other tests show what Inductor makes of such a model
    with patch("torch.distributed.init_process_group") as begun, fast:
        exec(code, names)
    begun.assert_called_once_with("gloo")
    return names["loss"].item(), [parameter.grad for parameter in model.parameters()]


def test_the_code_of_readme_has_the_numbers_of_one_process(ranks: Callable[..., list[Any]]) -> None:
    model, ids = llama()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for found, gradients in ranks(2, run_readme):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_notebook_has_the_cells_of_the_script() -> None:
    written = json.loads(NOTEBOOK.read_text())
    found = [Cell(cell["cell_type"], "".join(cell["source"])) for cell in written["cells"]]
    assert found == cells(SCRIPT.read_text()), "run: python -m tests.documents.notebook"
    assert {cell["cell_type"] for cell in written["cells"]} == {"markdown", "code"}
    assert written["nbformat"] == 4 and len({cell["id"] for cell in written["cells"]}) == len(found)


def test_cells_are_run_as_a_notebook_does(tmp_path: Path) -> None:
    """Their names are shared, what they print is kept, and so is what the last line is worth."""
    parts = cells("# %% [markdown]\n# # Title\n# text\n\n# %%\nx = 1\n\n# %%\nprint('two')\ny = x + 1\nprint(y)\n")
    assert parts[0] == Cell("markdown", "# Title\ntext")
    none, nothing, [printed, worth] = run(parts, tmp_path)
    assert (none, nothing) == ([], [])
    assert printed["text"] == ["two\n"] and worth["data"] == {"text/plain": ["2"]}
    with pytest.raises(ZeroDivisionError):
        list(run(cells("# %%\n1 / 0"), tmp_path))


@pytest.mark.zoo
@pytest.mark.timeout(1200)
def test_the_tutorial_runs() -> None:
    """All cells of the notebook, without Jupyter; two of them start two ranks, which run the script."""
    outputs = list(run(cells(SCRIPT.read_text()), EXAMPLES))
    text = "".join(line for shown in outputs for output in shown for line in output.get("text", []))
    assert "on two ranks" in text and "verified" in text and "['topk'] is gathered" in text
    assert (
        sum("text/html" in output.get("data", {}) for shown in outputs for output in shown) >= 2
    )  # the plan and the diff
