"""Predictions in tests: trained and saved models, passive parties that serve them over mutual TLS
on loopback, and programs that ask over HTTP.
"""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from torch import Tensor

from splitveil.active_party.commands import serve
from splitveil.active_party.http.service import AnswerService
from splitveil.active_party.http.status import OnlineStatus
from splitveil.active_party.predict.predictor import ModelChoice, Predictor, open_predictor
from splitveil.active_party.results import save_alone, save_results
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.common.alignment.exchange import build_engine
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.party_settings import PartySettingsT, load_party_settings
from splitveil.common.privacy.figures import PredictionFigures
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE
from splitveil.common.wire.recorded_calls import AllNotes
from splitveil.deploy.authority import PartyFolder, make_certificates
from splitveil.library.loading import PartiesSettings
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.passive_party.predict.service import (
    InferenceServer,
    InferenceService,
    InferenceStatus,
    Throttle,
)
from splitveil.passive_party.settings import PassiveSettings
from tests.support import simulation
from tests.support.runs import ACTIVE as ACTIVE_VALUES
from tests.support.runs import CONTRACT, CPU, PASSIVE, write_table, write_yaml
from tests.support.simulation import ActiveParty, Simulation, assemble_active, free_address

IN_TIME_S = 300.0


@dataclass
class Trained:
    settings: PartiesSettings
    certificates: Path
    test_ids: list[str]
    """Of the test rows, in the order of the evaluation."""
    test_logits: Tensor
    """What the last evaluation found for them."""
    test: Evaluation
    refitted: PredictionFigures | None
    alone: PredictionFigures | None
    run_id: str

    def active(self, *overrides: str) -> ActiveSettings:
        return _changed(self.settings.active, overrides)

    def passive(self, name: str, *overrides: str) -> PassiveSettings:
        return _changed(self.settings.passive[name], overrides)


def _changed(settings: PartySettingsT, overrides: Sequence[str]) -> PartySettingsT:
    values = settings.model_dump()
    for override in overrides:
        name, _, value = override.partition("=")
        *sections, last = name.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[last] = yaml.safe_load(value)
    return type(settings).model_validate(values | {"base_dir": settings.base_dir})


def train(folder: Path, runs: Path, *overrides: str, active: Sequence[str] = ()) -> Trained:
    """Train the parties of a folder in this process, and save their halves of the model.

    Settings of security are replaced.
    """
    certificates = runs / "certificates"
    both = [*overrides, f"runs_dir={runs}", "device=cpu", "torch_threads=1"]
    files = [folder / "active.yaml", *_passive_files(folder)]
    names = [_party_of(file) for file in files]
    make_certificates(certificates, {name: f"{name}.splitveil" for name in names})
    passive = {
        name: load_party_settings(PassiveSettings, file, [*both, *_security(certificates, name)])
        for name, file in zip(names[1:], files[1:], strict=True)
    }
    own = ["refit=null", *both, *active, *_security(certificates, ACTIVE)]
    settings = PartiesSettings(load_party_settings(ActiveSettings, files[0], own), passive)
    return _train(settings, certificates)


def _passive_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.yaml")) if path.stem not in {ACTIVE, "contract"}]


def _party_of(file: Path) -> str:
    if file.stem == ACTIVE:
        return ACTIVE
    return str(yaml.safe_load(file.read_text()).get("party", "passive"))


def _security(certificates: Path, name: str) -> list[str]:
    own = PartyFolder(certificates / name)
    own_files = {
        "certificate": own.certificate,
        "private_key": own.private_key,
        "authority": own.authority,
    }
    return ["security.mode=mtls", *(f"security.{name}={path}" for name, path in own_files.items())]


def _train(settings: PartiesSettings, certificates: Path) -> Trained:
    contract = settings.active.contract
    seen = simulation.ActiveRecording()
    session, builder = assemble_active(settings.active, seen, device=CPU)
    parties = {
        name: simulation.build_passive(own, device=CPU) for name, own in settings.passive.items()
    }
    active = ActiveParty(settings.active, session, build_engine(contract.alignment), seen)
    Simulation(active, parties).meet()
    folder = settings.active.run_folder(ACTIVE)
    folder.mkdir(parents=True, exist_ok=True)
    refitted, _ = save_results(settings.active, folder, session, builder)
    alone = save_alone(settings.active, folder, session, builder)
    for party in parties.values():
        trainer = party.run.trainer
        assert trainer is not None
        assert party.builder is not None
        own_folder = party.settings.run_folder(party.settings.folder_name())
        own_folder.mkdir(parents=True, exist_ok=True)
        party.builder.save(own_folder, trainer.model, party.run.model_identity)
    rows = session.lifecycle.answering.rows
    predictions = session.lifecycle.answering.test_predictions
    assert predictions is not None
    return Trained(
        settings,
        certificates,
        [session.ids[row] for row in rows.file_rows[rows.splits["test"]]],
        predictions.logits,
        seen.evaluations[-1],
        refitted,
        alone,
        session.run_id,
    )


def free_port() -> int:
    return int(free_address().rpartition(":")[2])


@contextmanager
def serving_passive(
    settings: PassiveSettings,
    port: int,
    transcript: Transcript | None = None,
    throttle: Throttle | None = None,
) -> Iterator[InferenceService]:
    """Serve one passive party's half of the model on a port of loopback."""
    model = ServedModel.load(settings, CPU)
    throttle = throttle or Throttle(settings.answers.ids_per_second)
    gives_table = settings.answers.whole_table
    status = InferenceStatus(settings.party, settings.contract)
    service = InferenceService(
        model, settings.party, settings.contract, throttle, gives_table=gives_table, status=status
    )
    notes = status if transcript is None else AllNotes(transcript, status)
    credentials = credential_files(settings, settings.party)
    address = f"127.0.0.1:{port}"
    with InferenceServer(service, settings.contract, address, credentials, notes):
        yield service


@contextmanager
def predicting(
    trained: Trained,
    *,
    passive: Sequence[str] = (),
    choice: ModelChoice | None = None,
    whole_table: bool = False,
) -> Iterator[Predictor]:
    """Serve every passive party, and open a predictor that has checked them."""
    with ExitStack() as resources:
        ports = {name: free_port() for name in trained.settings.passive}
        for name, port in ports.items():
            own = trained.passive(name, *passive)
            resources.enter_context(serving_passive(own, port))
        settings = trained.active(connecting_to(ports))
        predictor = resources.enter_context(
            open_predictor(settings, CPU, choice, whole_table=whole_table)
        )
        predictor.check_models()
        yield predictor


def connecting_to(ports: Mapping[str, int]) -> str:
    places = ", ".join(f"{name}: '127.0.0.1:{port}'" for name, port in ports.items())
    return f"inference.connect={{{places}}}"


def write_wide_deep(folder: Path, rows: int = 500, seed: int = 5, kind: str = "wide_deep") -> None:
    """Write an example whose parties both have numbers and categories, for ``wide_deep``."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 4))
    words = generator.integers(0, 12, size=(rows, 2))
    score = x[:, 0] + x[:, 2] + (words[:, 0] % 3) - (words[:, 1] % 2)
    labels = (score + generator.normal(scale=0.5, size=rows) > 0.5).astype(int)
    ids, texts = [f"row-{i:04d}" for i in range(rows)], np.char.add("w", words.astype(str)).T
    order = generator.permutation(rows)
    own = labels, *x.T[:2], texts[0]
    write_table(folder / "active.csv", "id,label,n1,n2,word", order, ids, *own)
    order = generator.permutation(rows)
    write_table(folder / "passive.csv", "id,n1,n2,word", order, ids, *x.T[2:], texts[1])
    model = {"kind": kind, "hidden": [16, 8], "embedding_dim": 3}
    features = {"numeric": "n*", "categorical": "word", "signed_log1p": True}
    contract = {**CONTRACT, "cut_shape": [8]}
    active = {**ACTIVE_VALUES, "top_model": model}
    active["data"] = {**ACTIVE_VALUES["data"], "features": features}  # type: ignore[dict-item]
    passive = {**PASSIVE, "bottom_model": model, "adversary": None}
    passive["data"] = {**PASSIVE["data"], "features": features}  # type: ignore[dict-item]
    write_yaml(folder, contract=contract, active=active, passive=passive)


ASKING_TAKES_S = 60.0
"""Longer than any answer takes on a busy machine."""


class Told(NamedTuple):
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """NaN where there is none."""
        values = self.body["probabilities"]
        width = next((len(v) for v in values if isinstance(v, list)), None)
        gap = np.nan if width is None else [np.nan] * width
        return np.array([gap if value is None else value for value in values], np.float32)


@dataclass
class Program:
    http: int
    service: AnswerService
    status: OnlineStatus
    access: serve.Access
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] | None = None

    def get(self, path: str) -> Told:
        return self._told("GET", path, None)

    def ask(self, ids: Sequence[object], **more: object) -> Told:
        return self.post(json.dumps({"ids": list(ids), **more}).encode())

    def post(self, body: bytes) -> Told:
        return self._told("POST", "/predict", body)

    def raw(self, request: bytes) -> bytes:
        """Return the head of the answer to some bytes."""
        with socket.create_connection(("127.0.0.1", self.http), ASKING_TAKES_S) as client:
            client.sendall(request)
            return client.recv(2**16).partition(b"\r\n\r\n")[0]

    def _told(self, method: str, path: str, body: bytes | None) -> Told:
        kind: Any = http.client.HTTPConnection
        more: dict[str, Any] = {}
        if self.tls is not None:
            kind, more = http.client.HTTPSConnection, {"context": self.tls}
        connection = kind("127.0.0.1", self.http, timeout=ASKING_TAKES_S, **more)
        try:
            given = {"Content-Type": "application/json", **(self.headers or {})}
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = "json" in str(answer.getheader("Content-Type"))
            found = json.loads(text) if is_json else {"text": text}
            return Told(answer.status, found, dict(answer.getheaders()))
        finally:
            connection.close()


@contextmanager
def answering(
    trained: Trained,
    *overrides: str,
    ports: Mapping[str, int],
    transcript: Transcript | None = None,
    table: Path | None = None,
) -> Iterator[Program]:
    """Answer programs at the active party; passive parties serve at these ports, or do not."""
    settings = trained.active(
        *("serving.timeout_s=30", "serving.fallback=false"),
        f"serving.http='127.0.0.1:{free_port()}'",
        *overrides,
        connecting_to(ports),
    )
    with ExitStack() as resources:
        status = OnlineStatus(settings.contract)
        notes = status if transcript is None else AllNotes(transcript, status)
        predictor = resources.enter_context(
            open_predictor(serve.impatient(settings), CPU, None, table, notes)
        )
        service = serve.open_service(settings, predictor, resources, status, transcript)
        access = serve.access_of(settings)
        server = resources.enter_context(serve.serving(settings, service, access))
        yield Program(server.port, service, status, access)


@contextmanager
def asked(trained: Trained, *overrides: str, **more: Any) -> Iterator[Program]:
    """Answer programs while every passive party serves as well."""
    with ExitStack() as resources:
        ports = {name: free_port() for name in trained.settings.passive}
        for name, port in ports.items():
            resources.enter_context(serving_passive(trained.passive(name), port))
        yield resources.enter_context(answering(trained, *overrides, ports=ports, **more))
