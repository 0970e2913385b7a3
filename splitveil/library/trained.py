"""The halves of the model that a run has trained: as modules, and exported for other programs."""

import logging
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from splitveil.active_party.predict.predictor import ModelChoice, load_top
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.canonical_form import compose
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.data.stored_ids import ABSENT
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import ServedRows
from splitveil.common.party.party_settings import PartySettingsT, load_party_settings
from splitveil.common.record.run_folder import write_bytes_atomically, write_json_atomically
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.imports import extra_missing, first_line
from splitveil.library.loading import Scratch
from splitveil.library.own_data import as_table
from splitveil.passive_party.predict.served_model import load_bottom
from splitveil.passive_party.settings import PassiveSettings

Format: TypeAlias = Literal["torch.export", "onnx"]
SUFFIXES: Mapping[Format, str] = {"torch.export": ".pt2", "onnx": ".onnx"}
_REGISTRATION = "torch.onnx._internal.exporter._registration"
ROWS = 4
"""Rows of the example inputs for an export; the first dimension of the export is free."""


@contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Let imports find the modules beside the settings files, as a party's process does."""
    before = sys.path[:]
    sys.path.append(str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def settings_of(
    section: type[PartySettingsT], folder: Path, base_dir: Path, *overrides: str
) -> PartySettingsT:
    """Return the settings that a party has left in its folder of a run; else SettingsError."""
    if not (folder / "settings.yaml").is_file():
        raise SettingsError(f"{folder}: expected a party's folder of a run, with settings.yaml")
    settings = load_party_settings(section, folder / "settings.yaml", overrides)
    runs = folder.resolve().parent.parent
    return settings.model_copy(update={"base_dir": base_dir, "runs_dir": runs})


def folders_of(
    run: Path, names: Sequence[str], passive: Mapping[str, str | Path] | str | Path | None = None
) -> dict[str, Path]:
    """Return the folders of the passive parties, those given or those beside the active party's."""
    if isinstance(passive, Mapping):
        missing = [name for name in names if name not in passive]
        if missing:
            raise SettingsError(f"passive: expected a folder of {', '.join(missing)}")
        return {name: Path(passive[name]) for name in names}
    if passive is not None:
        if len(names) > 1:
            raise SettingsError(f"passive: expected a folder for each of {', '.join(names)}")
        return {names[0]: Path(passive)}
    return {name: run / (name if len(names) > 1 else "passive") for name in names}


def as_text(one: Any) -> str:
    return compose([str(part) for part in one]) if isinstance(one, list | tuple) else str(one)


class Half(NamedTuple):
    settings: ActiveSettings | PassiveSettings
    model: nn.Module
    encoder: FeatureEncoder | None

    @classmethod
    def of(cls, run: Path, party: str, base_dir: Path, choice: ModelChoice = "trained") -> "Half":
        """Load a party's half, in eval mode on the CPU; else SettingsError."""
        active = settings_of(ActiveSettings, run / ACTIVE, base_dir)
        with own_modules(base_dir):
            if party == ACTIVE:
                trained, model, _ = load_top(active, choice)
                return cls(active, model, trained.encoder)
            folders = folders_of(run, active.contract.passive_parties)
            if party not in folders:
                raise SettingsError(f"expected {' or '.join([ACTIVE, *folders])}, got {party!r}")
            own = settings_of(PassiveSettings, folders[party], base_dir, f"party={party}")
            trained, model = load_bottom(own)
            return cls(own, model, trained.encoder)

    def features(self, ids: Iterable[Any] | None, table: Any) -> Features:
        path = None
        if table is not None:
            scratch = Scratch()
            path = scratch.path / "table.parquet"
            parquet.write_table(as_table(table, "table"), path)
        rows = ServedRows.load(self.settings, self.encoder, path)
        if ids is None:
            return rows.features_of(rows.served()).to("cpu")
        found = rows.rows_of([as_text(one) for one in ids])
        if missing := int((found == ABSENT).sum()):
            raise DataError(f"{rows.source}: {missing:,} of {len(found):,} ids have no row")
        return rows.features_of(found).to("cpu")

    def export(self, path: Path, kind: Format) -> None:
        """Write the half as a program of tensors by name, and its encoder as JSON beside it."""
        inputs: dict[str, Tensor] = {}
        if isinstance(self.settings, ActiveSettings):
            inputs["activation"] = torch.zeros(ROWS, *self.settings.contract.aggregate_shape)
        if self.encoder is not None:
            rows = vars(self.encoder.shapes.zeros(ROWS))
            inputs |= {name: part for name, part in rows.items() if part is not None}
            if "numeric" in inputs:
                width = inputs["numeric"].shape[1] - len(self.encoder.indicators)
                inputs["numeric"] = torch.zeros(ROWS, width, dtype=torch.float64)
            write_json_atomically(path.with_suffix(".encoder.json"), self.encoder.state())
        shapes = {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
        half = _OfTensors(self.model, self.encoder, takes_activation="activation" in inputs).eval()
        written = BytesIO()
        try:
            with warnings.catch_warnings(action="ignore"):  # torch's, of its own parts
                program = torch.export.export(half, (), inputs, dynamic_shapes=shapes)
                if kind == "onnx":
                    # It warns that torchvision is absent, which no half uses.
                    logging.getLogger(_REGISTRATION).setLevel(logging.ERROR)
                    converted: Any = torch.onnx.export(program, dynamo=True, verbose=False)
                    written.write(converted.model_proto.SerializeToString())
                else:
                    torch.export.save(program, written)
        except Exception as error:  # torch raises many kinds
            raise SettingsError(
                f"{path.stem}: {kind} cannot express the model: {first_line(error)}"
            ) from error
        write_bytes_atomically(path, written.getvalue())


class _Scaling(nn.Module):
    """The encoding of numbers by ``RowEncoder``, as tensor operations that can be exported."""

    def __init__(self, encoder: FeatureEncoder) -> None:
        super().__init__()
        self._signed_log1p = encoder.signed_log1p
        scalers, wide = encoder.numeric, partial(torch.tensor, dtype=torch.float64)
        names = [one.name for one in scalers]
        self._marked = [names.index(name) for name in encoder.indicators]
        self.shift = nn.Buffer(wide([one.shift for one in scalers]))
        self.scale = nn.Buffer(wide([one.scale for one in scalers]))
        fills = [math.nan if one.fill is None else one.fill for one in scalers]
        self.fill = nn.Buffer(wide(fills))
        edges = [*map(wide, encoder.bins)] or [wide([])]
        # A bin of infinite width adds nothing: it stands where other columns have more bins.
        self.lows = nn.Buffer(pad_sequence([one[:-1] for one in edges], True))
        self.widths = nn.Buffer(pad_sequence([one.diff() for one in edges], True, math.inf))
        self._bins = bool(encoder.bins)

    def forward(self, numeric: Tensor) -> Tensor:
        values, members = numeric.tensor_split([len(self.shift)], dim=1)
        if self._signed_log1p:
            values = values.sign() * values.abs().log1p()
        gaps = values.isnan()
        values = (torch.where(gaps, self.fill, values) - self.shift) / self.scale
        if self._bins:
            values = ((values[:, :, None] - self.lows) / self.widths).clamp(0, 1).sum(dim=2)
        return torch.cat([values, gaps[:, self._marked], members], dim=1).float()


class _OfTensors(nn.Module):
    def __init__(
        self, model: nn.Module, encoder: FeatureEncoder | None, *, takes_activation: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.scaling = _Scaling(encoder) if encoder is not None and encoder.numeric_parts else None
        self._takes_activation = takes_activation

    def forward(
        self,
        activation: Tensor | None = None,
        numeric: Tensor | None = None,
        categorical: Tensor | None = None,
        image: Tensor | None = None,
        tokens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        if self.scaling is not None:
            numeric = self.scaling(numeric)
        given = (numeric, categorical, image, tokens, lengths)
        features = None if all(part is None for part in given) else Features(*given)
        called = (activation, features) if self._takes_activation else (features,)
        output: Tensor = self.model(*called)
        return output


def export(
    run: Path, folder: Path, base_dir: Path, kind: Format, choice: ModelChoice
) -> list[Path]:
    """Export the halves whose party's folder is there, and return the files; see ``Run.export``."""
    if kind not in SUFFIXES:
        raise ValueError(f"expected {' or '.join(SUFFIXES)}, got {kind!r}")
    if kind == "onnx":
        try:
            import_module("onnxscript")
        except ImportError as error:
            raise extra_missing("format onnx", "onnx") from error
    active = settings_of(ActiveSettings, run / ACTIVE, base_dir)
    folders = folders_of(run, active.contract.passive_parties)
    parties = [ACTIVE, *(name for name, own in folders.items() if own.exists())]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = [folder / f"{party}{SUFFIXES[kind]}" for party in parties]
    for party, path in zip(parties, paths, strict=True):
        Half.of(run, party, base_dir, choice).export(path, kind)
    return paths
