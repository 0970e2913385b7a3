"""Predicts by id: asks every passive party for activations, and turns them into predictions.

Nothing that is computed here is sent to anybody.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor, nn

from splitveil.active_party.predict.embed_client import EmbedClient, TableClient
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.aggregation import aggregate
from splitveil.active_party.training.boosting import WithTrees
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind, kind_of
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.data.stored_ids import ABSENT
from splitveil.common.errors import SettingsError
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.factory import build_top_model
from splitveil.common.models.settings import ModelSettings
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.party_data import ServedRows
from splitveil.common.record.model_files import REFITTED, TOP_MODEL, TREES, WEIGHTS, TrainedModel
from splitveil.common.run.contract import ACTIVE, Aggregation
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.common.text.files import Closing
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import check_security
from splitveil.common.wire.http_proxy import proxy_of_environment
from splitveil.common.wire.recorded_calls import Notes

logger = logging.getLogger(__name__)

_TOP_MODEL: TypeAdapter[ModelSettings] = TypeAdapter(ModelSettings)
ModelChoice = Literal["best", "trained", "refitted"]
ClientT = TypeVar("ClientT", bound=EmbedClient)


def load_top(
    settings: ActiveSettings, choice: ModelChoice | None = None
) -> tuple[TrainedModel, nn.Module, Literal["trained", "refitted"]]:
    """Load the top model that a run has left, in eval mode on the CPU, and say which it is."""
    contract, folder = settings.contract, settings.run_folder(ACTIVE)
    choice = choice or settings.inference.model
    has_refitted = (folder / "checkpoint" / REFITTED).exists()
    if choice == "refitted" and not has_refitted:
        raise SettingsError(
            f"inference.model: {folder} has no {REFITTED}: only a run to its end with settings for "
            f"refit leaves one"
        )
    if choice == "best":
        choice = "refitted" if has_refitted else "trained"
    weights = REFITTED if choice == "refitted" else WEIGHTS
    trained = TrainedModel.open(folder, contract, weights)
    built_by = trained.saved.metadata.get(TOP_MODEL)  # ``active refit`` may have chosen another
    model = build_top_model(
        settings.top_model if built_by is None else _TOP_MODEL.validate_json(built_by),
        contract.aggregate_shape,
        trained.encoder,
        seed=settings.model_seed,
        num_classes=settings.data.num_classes,
    )
    if (sizes := trained.saved.metadata.get(TREES)) is not None:
        model = WithTrees(model, *map(int, sizes.split()))
    model = settings.defense.predicting(model)
    trained.put_into(model)
    return trained, model, choice


class JointModel:
    """The top model as a run has left it. Several threads may use it; one at a time computes."""

    def __init__(
        self,
        identity: ModelIdentity,
        model: nn.Module,
        encoder: FeatureEncoder | None,
        aggregation: Aggregation,
        device: torch.device,
        kind: Literal["trained", "refitted"],
        labels: LabelKind = CLASS_LABELS,
    ) -> None:
        self.identity = identity
        self.metadata: Mapping[str, str] = {}  # of its file
        self.encoder = encoder
        self.kind = kind
        self._model = model.to(device)
        self._aggregation = aggregation
        self._device = device
        self._labels = labels
        self.shape_of_row = labels.shape_of_row
        self._computing = threading.Lock()

    @classmethod
    def load(
        cls, settings: ActiveSettings, device: torch.device, choice: ModelChoice | None = None
    ) -> "JointModel":
        trained, model, kind = load_top(settings, choice)
        rule, labels = settings.contract.aggregation, kind_of(settings.data)
        found = cls(trained.identity, model, trained.encoder, rule, device, kind, labels)
        found.metadata = trained.saved.metadata
        return found

    def predictions(
        self, activations: Sequence[Tensor], own: Features | None
    ) -> NDArray[np.float32]:
        """Return the model's predictions.

        Returns the probabilities of label 1, (rows,), or of each class, (rows, classes); or numbers
        in the label's unit, (rows,). Shapes: ``activations`` (rows, *cut_shape).
        """
        if not len(activations[0]):
            return np.empty((0, *self.shape_of_row), np.float32)
        with self._computing:
            cut = aggregate(self._aggregation, activations).to(self._device, torch.float32)
            features = None if own is None else own.to(self._device)
            found = predict_in_blocks(self._model, cut, features, link=self._labels.predicted)
        return self._labels.in_units(np.asarray(found.cpu().numpy(), np.float32))


class Predictions(NamedTuple):
    probabilities: NDArray[np.float32]
    """Of label 1, (ids,), or of each class, (ids, classes); or numbers in the label's unit, (ids,).
    NaN for an id that was not found."""
    found: NDArray[np.bool_]  # whether every party has a row of the id, (ids,)
    missing_at: dict[str, int]


class Asked(NamedTuple):
    """A question that is under way at every passive party."""

    ids: Sequence[str]
    rows: NDArray[np.int64] | None  # in this party's own table; None if the model needs none
    answers: "list[Future[Embedded]]"


def asking_order(ids: Sequence[str]) -> NDArray[np.int64]:
    """Return a sorted order of the ids: the order of a list may depend on labels."""
    return np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)


class Predictor(Closing):
    """Answers ids with probabilities. Several threads may use it."""

    def __init__(
        self,
        model: JointModel,
        clients: Sequence[EmbedClient],
        own_rows: ServedRows | None = None,
    ) -> None:
        self.model = model
        self.clients = tuple(clients)
        self.own_rows = own_rows

    @property
    def max_ids(self) -> int:
        return min(client.max_ids for client in self.clients)

    def check_models(self) -> None:
        """Ask every passive party which model it serves, and check that all belong together."""
        for client in self.clients:
            client.check_model()

    def take_tables(
        self, ids: Sequence[str], interruption: Callable[[], int | None] = lambda: None
    ) -> None:
        """Take the whole tables of passive parties whose clients need them, for some ids."""
        for client in self.clients:
            if isinstance(client, TableClient):
                client.take(ids, interruption)

    def ask(self, ids: Sequence[str]) -> Asked:
        # First: these rows are read while the question is under way.
        answers = [client.submit(ids) for client in self.clients]
        rows = None if self.own_rows is None else self.own_rows.rows_of(ids)
        return Asked(ids, rows, answers)

    def finish(self, asked: Asked) -> Predictions:
        """Wait for the answers to a question, and compute the probabilities."""
        return self.combine(asked, [answer.result() for answer in asked.answers])

    def predict(self, ids: Sequence[str]) -> Predictions:
        return self.finish(self.ask(ids))

    def combine(
        self, asked: Asked, embedded: Sequence[Embedded], given: Features | None = None
    ) -> Predictions:
        """Compute the probabilities of a question from all its answers."""
        found = np.logical_and.reduce([answer.known for answer in embedded])
        missing_at = {
            client.party: int((~answer.known).sum())
            for client, answer in zip(self.clients, embedded, strict=True)
        }
        own = None
        if given is not None:
            own = given.rows(torch.from_numpy(np.flatnonzero(found)))
        elif self.own_rows is not None and asked.rows is not None:
            is_known = asked.rows != ABSENT
            missing_at[ACTIVE] = int((~is_known).sum())
            found &= is_known
            own = self.own_rows.features_of(asked.rows[found])
        activations = [
            answer.values
            if found.sum() == len(answer.values)
            # Of the rows that this party knows, those that all parties know.
            else answer.values[torch.from_numpy(found[answer.known])]
            for answer in embedded
        ]
        known = self.model.predictions(activations, own)
        probabilities = np.full((len(found), *known.shape[1:]), np.nan, np.float32)
        probabilities[found] = known
        return Predictions(probabilities, found, missing_at)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def log_security(settings: ActiveSettings) -> None:
    credentials = credential_files(settings, ACTIVE)
    for party, address in settings.inference.connect.items():
        security = check_security(credentials, address, f"inference.connect.{party}")
        level = logging.WARNING if credentials is None else logging.INFO
        logger.log(level, "security towards %s: %s", party, security)


def open_predictor(
    settings: ActiveSettings,
    device: torch.device,
    choice: ModelChoice | None = None,
    table: Path | None = None,
    notes: Notes | None = None,
    *,
    whole_table: bool = False,
) -> Predictor:
    """Load this half of the model; nothing is asked yet: ``check_models`` has to come first."""
    whole_table |= settings.contract.is_one_sided
    model = JointModel.load(settings, device, choice)
    own_rows = None if model.encoder is None else ServedRows.load(settings, model.encoder, table)
    if table is not None and own_rows is None:
        raise SettingsError("--data: the model has no features of this party")
    kind = TableClient if whole_table else EmbedClient
    clients = open_clients(settings, kind, model.identity, notes)
    return Predictor(model, clients, own_rows)


def open_clients(
    settings: ActiveSettings,
    kind: Callable[[PeerConnection, ModelIdentity | None, float], ClientT],
    model: ModelIdentity | None,
    notes: Notes | None = None,
) -> list[ClientT]:
    """Open a client for each passive party, in the contract's order."""
    contract, addresses = settings.contract, settings.inference.connect
    missing = [name for name in contract.passive_parties if name not in addresses]
    unknown = [name for name in addresses if name not in contract.passive_parties]
    problems = [
        f"inference.connect: no address of passive party {name!r}: add inference.connect.{name}, "
        f"the host and port of its splitveil serve"
        for name in missing
    ]
    problems += [f"inference.connect: the contract has no passive party {n!r}" for n in unknown]
    if problems:
        raise SettingsError(problems)
    credentials = credential_files(settings, ACTIVE)
    uses_proxy = settings.inference.proxy is not None
    with ExitStack() as opened:
        clients: list[ClientT] = []
        for party in contract.passive_parties:
            address = addresses[party]
            proxy = proxy_of_environment(address) if uses_proxy else None
            connection = PeerConnection(address, contract, credentials, notes, proxy, party)
            clients.append(kind(connection, model, settings.reconnect.deadline_s))
            opened.enter_context(clients[-1])
        opened.pop_all()
    return clients
