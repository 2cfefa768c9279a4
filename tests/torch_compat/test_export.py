"""The format of .pt2 files."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import torch._functorch.predispatch
from torch import nn

from ringopt.torch_compat.export import (
    DTYPES,
    LAYOUTS,
    MEMORY_FORMATS,
    PRIVATE_FUNCTIONS,
    SCHEMA_VERSION,
    FileReader,
    Union,
    schema,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "linear.pt2"
    torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),)), path)
    return path


def test_the_reader_gives_every_member(file: Path) -> None:
    reader = FileReader(str(file))
    (model,) = (name for name in reader.get_all_records() if name.endswith("models/model.json"))
    said = json.loads(reader.get_record(model))
    assert said["schema_version"]["major"] == SCHEMA_VERSION[0]
    value = said["graph_module"]["graph"]["tensor_values"]
    assert {DTYPES[tensor["dtype"]] for tensor in value.values()} == {torch.float32}
    assert {LAYOUTS[tensor["layout"]] for tensor in value.values()} == {torch.strided}


def test_numbers_stand_for_terms_of_torch() -> None:
    assert set(DTYPES.values()) >= {torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool}
    assert torch.strided in LAYOUTS.values() and torch.channels_last in MEMORY_FORMATS.values()


def test_the_schema_is_dataclasses_with_annotations() -> None:
    kinds = (schema.ExportedProgram, schema.Graph, schema.Node, schema.TensorMeta, schema.PayloadConfig)
    for kind in kinds:
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields == set(typing.get_type_hints(kind, globalns=vars(schema), include_extras=True))
    assert issubclass(schema.Argument, Union) and not issubclass(schema.Node, Union)
    assert {"as_tensor", "as_int", "as_operator"} <= {field.name for field in dataclasses.fields(schema.Argument)}


@pytest.mark.parametrize("name", PRIVATE_FUNCTIONS)
def test_functions_that_files_name_exist(name: str) -> None:
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if release < (2, 13) and re.search("dual|jvp|unwrap", name):
        return  # forward-mode transforms are exported from torch 2.13 on
    assert callable(attrgetter(name.removeprefix("torch."))(torch))
