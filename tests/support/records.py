"""The files that a run leaves: written without a run, and read."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from splitveil.common.record.run_record import METRICS, Line, Summary, parts_of
from splitveil.common.text.values import from_form

FoundT = TypeVar("FoundT")


def known(found: FoundT | None) -> FoundT:
    assert found is not None
    return found


def append_lines(folder: Path, *lines: Line, time_s: float = 0.1) -> None:
    with (folder / METRICS).open("a", encoding="utf-8") as metrics:
        metrics.writelines(text_of(lines, time_s))


def summary_of(form: dict[str, Any]) -> Summary:
    return from_form(Summary, form)


def text_of(lines: Iterable[Line], time_s: float = 0.1) -> Iterable[str]:
    parts = (parts_of(line, time_s) for line in lines)
    return (json.dumps(head | figures) + "\n" for head, figures in parts)


def weights_of(run_folder: Path, party: str) -> dict[str, torch.Tensor]:
    return load_file(run_folder / party / "checkpoint" / "model.safetensors")


def columns_of(frame: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = pa.table(frame).to_pydict()
    return found


def call_of(path: Path) -> Callable[..., Tensor]:
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    return lambda **given: torch.from_numpy(
        session.run(None, {name: tensor.numpy() for name, tensor in given.items()})[0]
    )
