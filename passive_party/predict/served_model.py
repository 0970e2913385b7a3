"""The trained bottom model and the rows that it answers for: by id, or the whole table, sealed."""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitveil.common.alignment import ristretto
from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.data.source_settings import expand_path
from splitveil.common.data.stored_ids import ABSENT
from splitveil.common.data.table_files import read_id_list
from splitveil.common.errors import InvalidMessage
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.models.settings import PcaModel
from splitveil.common.party.drift import Drift
from splitveil.common.party.party_data import ServedRows
from splitveil.common.record.model_files import TrainedModel
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.common.wire.inference_codec import Secret, rows_of_a_reply, seal, secrets_of
from splitveil.common.wire.tensor_codec import TensorLimits
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb

if TYPE_CHECKING:
    from torch import nn


def load_bottom(settings: PassiveSettings) -> tuple[TrainedModel, "nn.Module"]:
    """Load the bottom model that a run has left, in eval mode on the CPU."""
    from splitveil.common.models.factory import build_bottom_model  # noqa: PLC0415 - it needs torch

    contract = settings.contract
    trained = TrainedModel.open(settings.run_folder(settings.folder_name()), contract)
    model = build_bottom_model(
        settings.bottom_model,
        trained.encoder or FeatureShapes(),
        contract.cut_shape,
        seed=settings.model_seed,
    )
    trained.put_into(model)
    return trained, model


def _embedding_of(
    settings: PassiveSettings, device: Any
) -> tuple[TrainedModel, Callable[[Features], Any]]:
    """Return the saved model, and a function that computes activations, with the run's bits."""
    contract, chosen = settings.contract, settings.bottom_model
    if isinstance(chosen, PcaModel) and not settings.has_network:
        trained = TrainedModel.open(settings.run_folder(settings.folder_name()), contract)
        shapes = FeatureShapes() if trained.encoder is None else trained.encoder.shapes
        computed = ComponentsBottom(chosen, shapes, contract.cut_shape)
        trained.saved.put_into(computed)
        return trained, computed
    from splitveil.common.models.blocks import predict_in_blocks  # noqa: PLC0415 - it needs torch

    trained, model = load_bottom(settings)
    model.to(device)
    return trained, lambda features: predict_in_blocks(model, features.to(device))


class ServedModel:
    """Answers ids with activations. Several threads may ask; one at a time is answered."""

    def __init__(
        self,
        identity: ModelIdentity,
        embedding: Callable[[Features], Any],
        rows: ServedRows,
        cut_shape: Sequence[int],
        metadata: Mapping[str, str],
    ) -> None:
        self.identity = identity
        self.metadata = metadata
        self.drift: Drift | None = None  # of the rows that are asked for
        self.rows = rows
        self._embedding = embedding
        self._cut_shape = tuple(cut_shape)
        self._computing = threading.Lock()

    @classmethod
    def load(
        cls, settings: PassiveSettings, device: Any, table: Path | None = None
    ) -> "ServedModel":
        trained, embedding = _embedding_of(settings, device)
        rows = ServedRows.load(settings, trained.encoder, table)
        allowed = settings.answers.allowed_ids
        if allowed is not None:
            path = expand_path("answers.allowed_ids", allowed, settings.base_dir)
            rows.serve_only(read_id_list(path, settings.data, settings.contract.ids).ids)
        said, cut_shape = trained.saved.metadata, settings.contract.cut_shape
        return cls(trained.identity, embedding, rows, cut_shape, said)

    def embed(self, ids: Sequence[str]) -> Embedded:
        """Return the activations of known ids, the same bits whatever is asked for beside them."""
        rows = self.rows.rows_of(ids)
        known = rows != ABSENT
        if self.drift is not None:
            self.drift.note(rows[known])
        return Embedded(known, self.activations(rows[known]))

    def activations(self, rows: NDArray[np.int64]) -> Any:
        """Return a tensor, or of a party without a network an array."""
        if not len(rows):
            return np.zeros((0, *self._cut_shape), np.float32)
        with self._computing:
            return self._embedding(self.rows.features_of(rows))


class SealedTable:
    """Seals rows under a scalar that lives as long as this process; computes each secret once."""

    def __init__(self, model: ServedModel, contract: Contract) -> None:
        self._model = model
        self._limits = TensorLimits.of(contract)
        self._group = ristretto.load()
        self._scalar = self._group.random_scalar()
        seed = secrets.randbits(128)
        # The order of the file would tell which row is which.
        order = np.random.default_rng(seed).permutation(model.rows.served())
        most = rows_of_a_reply(contract)
        self._chunks = [order[start : start + most] for start in range(0, len(order), most)]
        self._secrets: dict[int, list[Secret]] = {}
        self._computing = threading.Lock()

    def multiply(self, points: bytes) -> bytes:
        """Return k P for each of some points P, or raise InvalidMessage."""
        try:
            return self._group.multiply(points, self._scalar)
        except ristretto.NotInGroupError as error:
            raise InvalidMessage(f"points: {error}") from error

    def replies(self) -> Iterator[pb.TableReply]:
        for number, rows in enumerate(self._chunks):
            values = self._model.activations(rows)
            yield seal(self._secrets_of(number), values, self._limits)

    def _secrets_of(self, number: int) -> list[Secret]:
        with self._computing:
            if number not in self._secrets:
                ids = self._model.rows.ids_at(self._chunks[number])
                points = self._group.mask(ristretto.digest_ids(ids), self._scalar)
                self._secrets[number] = list(secrets_of(points))
            return self._secrets[number]
