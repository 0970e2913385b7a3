"""The trained model in a run's ``checkpoint`` folder: written, continued, and used for predictions.

checkpoint/model.safetensors     the weights
checkpoint/encoder.json          the encoding of the features

The weights depend on the encoding that was fitted to the features: a category's slot in an
embedding, the mean that was subtracted. So whoever takes over the weights takes over vocabularies
and scalers too; nothing is fitted again, and a category that has appeared since counts as unknown.

Each file of weights says in its metadata whether true labels were learned from, or only labels that
a defense had released, and which run it is from: its id, the number of batches that the weights
have seen, and the digest of the contract. Both halves of a model have to agree in the latter.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.data.source_settings import expand_path
from splitveil.common.data.table import Table
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import BottomModelSettings, CustomModel
from splitveil.common.record import run_folder
from splitveil.common.run.contract import Contract, first_difference
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.run.state_bytes import is_finite, to_safetensors
from splitveil.common.settings import validate
from splitveil.common.text.files import check_regular, read_bytes
from splitveil.common.text.yaml_text import RESOLVED, read_yaml_file

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = "model.safetensors"
REFITTED = "refitted.safetensors"
ALONE = "alone.safetensors"
ENCODER = "encoder.json"
TOP_MODEL = "top_model"  # metadata of weights: the settings of their model, as JSON
TREES = "trees"  # the same: how large the trees beside it are, if there are any


def save_model(
    folder: Path,
    model: Any,
    encoder: FeatureEncoder | None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    checkpoint = run_folder.checkpoint_folder(folder)
    if encoder is not None:
        run_folder.write_json_atomically(checkpoint / ENCODER, encoder.state())
    save_tensors(folder, WEIGHTS, model.state_dict(), metadata)
    return checkpoint


def save_tensors(
    folder: Path,
    file_name: str,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    path = run_folder.checkpoint_folder(folder) / file_name
    said = None if metadata is None else dict(metadata)
    run_folder.write_bytes_atomically(path, to_safetensors(tensors, said))
    return path


def delete_saved(folder: Path, file_name: str) -> None:
    run_folder.delete(folder / "checkpoint" / file_name)


SETTING = "initial_weights"
PRETRAINED = "bottom_model.weights"

TRUE_LABELS = {"learned_from": "true labels"}  # metadata of weights that true labels have entered
RELEASED_LABELS = {"learned_from": "released labels"}
"""Metadata of weights that only labels released by a defense have entered."""

KNOWN_NOISE = {"noise": "insecure_noise_seed"}
"""Metadata of a run's results if anybody who knows the seed can reproduce the noise."""

_UNREADABLE = (
    *(SafetensorError, ValueError, LookupError, TypeError, AttributeError),
    *(RuntimeError, MemoryError),
)
"""Errors that the libraries raise for files of another kind; errors of the disk are not among them.
"""
_NOT_OF_NUMPY = (TypeError, KeyError, AttributeError)  # raised for bfloat16 and other of torch's
_CHECKPOINT = "the checkpoint folder of this party in a run that has ended, as RUN/PARTY/checkpoint"
_MAX_ENCODER_BYTES = 2**31  # twice the size of vocabularies with a hundred million categories


@dataclass(frozen=True)
class EarlierModel:
    folder: Path
    encoder: FeatureEncoder | None  # None for an active party without features
    is_label_free: bool = False  # whether only labels that a defense released have entered
    metadata: Mapping[str, str] = field(default_factory=dict)  # kept with the weights
    weights: str = WEIGHTS  # the name of the file of weights
    setting: str = SETTING  # what names the folder, for messages

    @classmethod
    def open(cls, folder: Path, weights: str = WEIGHTS, setting: str = SETTING) -> "EarlierModel":
        """Open a folder. The weights are checked now, and loaded when they are needed."""
        path = folder / weights
        with _reading(folder, weights, setting):
            check_regular(path)
            spoilt = _first_not_finite(path)
            metadata = _metadata(path)
            encoder = None
            with suppress(FileNotFoundError):
                text = read_bytes(folder / ENCODER, _MAX_ENCODER_BYTES)
                encoder = FeatureEncoder.from_state(from_json(text))
        _check_finite(spoilt, path, setting)
        is_free = metadata.items() >= RELEASED_LABELS.items()
        return cls(folder, encoder, is_free, metadata, weights, setting)

    def encoder_for(self, table: Table | None, source: str) -> FeatureEncoder | None:
        """Return that run's encoder if the table fits it, or raise SettingsError or DataError."""
        if (table is None) != (self.encoder is None):
            had, has = ("features", "none") if table is None else ("no features", "some")
            raise SettingsError(
                f"{self.setting}: {self.folder}: that run's party had {had}, data.features has "
                f"{has}"
            )
        if table is None or self.encoder is None:
            return None
        self.encoder.check_same_columns(table)
        columns = (*table.numeric, *table.coded)
        new = [name for name in columns if name not in self.encoder.columns]
        if new:
            raise SettingsError(
                f"{self.setting}: {source}: the model was trained without {', '.join(new)}: leave "
                f"the column out of data.features"
            )
        return self.encoder

    def put_into(self, model: Any) -> None:
        """Load the weights into a module, or a model whose state is arrays."""
        _put(self.folder / self.weights, model, self.setting)
        if metadata_of(self.folder, self.weights, self.setting) != self.metadata:
            raise SettingsError(
                f"{self.setting}: {self.folder / self.weights}: another run has left its weights "
                f"there since this process started: expected a folder that no run writes to"
            )


@dataclass(frozen=True)
class PretrainedWeights:
    """Files with the initial weights of modules of a party's own bottom model."""

    files: Mapping[str, Path]  # by module; an empty name is the whole model
    digest: str = ""

    @classmethod
    def open(cls, model: BottomModelSettings, base_dir: Path) -> "PretrainedWeights":
        """Check the files that settings name; they are loaded when they are needed."""
        named = model.weights if isinstance(model, CustomModel) else {}
        files = {part: expand_path(PRETRAINED, name, base_dir) for part, name in named.items()}
        digest = hashlib.sha256()
        for part, path in files.items():
            with _reading(path, path.name, PRETRAINED, "a file of safetensors"):
                check_regular(path)
                spoilt = _first_not_finite(path)
                with path.open("rb") as file:
                    digest.update(part.encode() + hashlib.file_digest(file, "sha256").digest())
            _check_finite(spoilt, path, PRETRAINED)
        return cls(files, digest.hexdigest() if files else "")

    def put_into(self, model: "nn.Module") -> None:
        for part, path in self.files.items():
            try:
                module = model.get_submodule(part)
            except AttributeError as error:
                raise SettingsError(f"{PRETRAINED}: the model has no module {part!r}") from error
            _put(path, module, PRETRAINED)


def _put(path: Path, model: Any, setting: str) -> None:
    expected = model.state_dict()
    load_file: Callable[[Path], Mapping[str, Any]] = safetensors.numpy.load_file
    if not all(isinstance(one, np.ndarray) for one in expected.values()):
        from safetensors.torch import load_file  # noqa: PLC0415 - it needs torch
    try:
        found = load_file(path)
    except (OSError, SafetensorError, *_NOT_OF_NUMPY) as error:
        raise SettingsError(f"{setting}: {path}: cannot be read") from error
    for name in dict.fromkeys((*expected, *found)):
        for form in (_shape, _dtype):
            there, here = form(found.get(name)), form(expected.get(name))
            if there != here:
                raise SettingsError(
                    f"{setting}: {path}: tensor {name!r} is {there} there and {here} in "
                    f"the model of these settings"
                )
    model.load_state_dict(found)


def metadata_of(folder: Path, file_name: str = WEIGHTS, setting: str = SETTING) -> dict[str, str]:
    """Return what a file of tensors says about itself; SettingsError if it cannot be read."""
    with _reading(folder, file_name, setting):
        check_regular(folder / file_name)
        return _metadata(folder / file_name)


def has_known_noise(path: Path) -> bool:
    """Return whether a run's file was made with noise of a known seed; not if it is unreadable."""
    with suppress(OSError, *_UNREADABLE):
        check_regular(path)
        return _metadata(path).items() >= KNOWN_NOISE.items()
    return False


@contextmanager
def _reading(
    folder: Path, weights: str, setting: str, expected: str = _CHECKPOINT
) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SettingsError(
            f"{setting}: {folder}: there is no {weights}: expected {expected}"
        ) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"{setting}: {folder}: cannot be read: {reason}") from error
    except _UNREADABLE as error:
        raise SettingsError(
            f"{setting}: {folder}: cannot be read ({type(error).__name__}): expected {expected}"
        ) from error


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="np") as file:
        return dict(file.metadata() or {})


def _first_not_finite(path: Path, framework: str = "np") -> str | None:
    try:
        with safe_open(path, framework=framework) as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                if not is_finite(file.get_tensor(name)):
                    return str(name)
    except _NOT_OF_NUMPY:
        if framework == "pt":
            raise
        return _first_not_finite(path, "pt")
    return None


def _check_finite(spoilt: str | None, path: Path, setting: str) -> None:
    if spoilt is not None:
        raise SettingsError(f"{setting}: {path}: tensor {spoilt!r} holds NaN or infinity")


def _dtype(tensor: Any) -> str:
    return "absent" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Any) -> str:
    if tensor is None:
        return "absent"
    return " x ".join(map(str, tensor.shape)) or "a single number"


_RUN, _BATCHES, _CONTRACT = "run_id", "batch_number", "contract"


def identity_metadata(model: ModelIdentity, contract: Contract) -> dict[str, str]:
    # A passive party that does not learn the common rows follows no course.
    batches = 0 if contract.is_one_sided else model.batch_number
    digest = contract.digest().hex()
    return {_RUN: model.run_id, _BATCHES: str(batches), _CONTRACT: digest}


def identity_of(folder: Path) -> tuple[str | None, str | None]:
    """Return run id and digest of the contract from a party's folder of a run, without weights."""
    try:
        found = _metadata(folder / "checkpoint" / WEIGHTS)
    except (OSError, SafetensorError):
        return None, None
    return found.get(_RUN), found.get(_CONTRACT)


@dataclass(frozen=True)
class TrainedModel:
    """One party's half of a trained model, in the ``checkpoint`` folder of the run."""

    identity: ModelIdentity
    saved: EarlierModel

    @classmethod
    def open(cls, folder: Path, contract: Contract, weights: str = WEIGHTS) -> "TrainedModel":
        """Open a party's folder of a run. The weights are loaded when they are needed."""
        has_learned = metadata_of(folder / "checkpoint", weights, "model").get(_BATCHES) != "0"
        if run_folder.end_of(folder) and (contract.is_one_shot or not has_learned):
            raise SettingsError(f"model: {folder}: this run was ended before there was a model")
        saved = EarlierModel.open(folder / "checkpoint", weights, "model")
        path = saved.folder / weights
        run_id, batches = saved.metadata.get(_RUN, ""), saved.metadata.get(_BATCHES, "")
        if not run_id or not batches.isdecimal():
            raise SettingsError(
                f"model: {path} does not say which run it is from; train again to predict with it"
            )
        trained_under = saved.metadata.get(_CONTRACT, "")
        if trained_under != contract.digest().hex():
            raise SettingsError(
                f"model: {path} was trained under another contract than that of these settings"
                f"{_difference(folder, trained_under, contract)}"
            )
        return cls(ModelIdentity(run_id, int(batches)), saved)

    @property
    def encoder(self) -> FeatureEncoder | None:
        return self.saved.encoder

    def put_into(self, model: "nn.Module") -> None:
        self.saved.put_into(model)
        model.eval()


def _difference(folder: Path, trained_under: str, contract: Contract) -> str:
    """Return the end of a sentence, which the settings in the run's folder give if they can."""
    with suppress(SettingsError, TypeError, KeyError):
        stored = read_yaml_file(folder / "settings.yaml", RESOLVED)["contract"]
        trained = validate(Contract, stored, "contract")
        if trained.digest().hex() == trained_under:
            then = trained.canonical_json()
            return f": {first_difference(contract, then, 'the time of training')}"
    return ""
