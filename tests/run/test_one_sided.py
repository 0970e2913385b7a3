"""One-sided alignment: the passive party's process sees the same whichever ids are common."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.one_sided import checked_table
from splitveil.active_party.predict.embed_client import TableClient
from splitveil.active_party.predict.predictor import open_clients, open_predictor
from splitveil.active_party.results import save_results
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.alignment import ristretto
from splitveil.common.errors import (
    AlignmentError,
    ContractMismatch,
    OtherModel,
    PeerUnreachable,
    SettingsError,
)
from splitveil.common.party.command_line import Process
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.record.run_store import RunStore
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import Contract
from splitveil.common.wire import inference_codec
from splitveil.common.wire.recorded_calls import AllNotes
from splitveil.passive_party.commands import run, serve
from splitveil.passive_party.predict import served_model
from splitveil.passive_party.predict.service import (
    InferenceServer,
    InferenceService,
    InferenceStatus,
)
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb
from tests.support import runs
from tests.support.commands import called
from tests.support.runs import CPU, build_parties, write_table, write_yaml
from tests.support.simulation import ActiveRecording, assemble_active, free_address

ROWS = 300
OURS = [f"person-{number:05d}" for number in range(ROWS)]
STRANGERS = [f"stranger-{number:05d}" for number in range(ROWS)]
MANY, FEW, NONE = (OURS[:count] + STRANGERS[: 250 - count] for count in (200, 5, 0))
ALIGNMENT = {"kind": "one_sided", "min_aligned": 20, "max_set_size": 500}
ONE_SHOT = {**runs.CONTRACT, "exchange": "one_shot", "alignment": ALIGNMENT}
QUICK = ("reconnect={max_s: 0.2, deadline_s: 60}", "leak_monitor=null")


def write(folder: Path, ids: Sequence[str], **contract: object) -> None:
    """Write a passive party's table, the same for all tests, and an active party's of some ids."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(ROWS, 5))
    score = x[:, 0] - x[:, 1]
    write_table(folder / "passive.csv", "id,x1,x2,x3,x4,x5", range(ROWS), OURS, *x.T)
    numbers = np.array([int(text[-5:]) for text in ids])
    labels, own = (score[numbers] > 0.3).astype(int), generator.normal(size=(2, len(ids)))
    write_table(folder / "active.csv", "id,label,own1,own2", range(len(ids)), ids, labels, *own)
    passive = {**runs.PASSIVE, "bottom_model": {"kind": "pca"}, "adversary": None}
    write_yaml(folder, contract=ONE_SHOT | contract, active=runs.ACTIVE, passive=passive)


def passive_settings(folder: Path, *overrides: str) -> PassiveSettings:
    own = [f"runs_dir={folder / 'runs'}", *overrides]
    return load_party_settings(PassiveSettings, folder / "passive.yaml", own)


def active_settings(folder: Path, address: str, *overrides: str) -> ActiveSettings:
    own = [f"runs_dir={folder / 'runs'}", f"inference.connect={{passive: '{address}'}}", *QUICK]
    return load_party_settings(ActiveSettings, folder / "active.yaml", [*own, *overrides])


def fit(settings: PassiveSettings, *, fresh: bool = False) -> None:
    run._take_part(settings, Process(CPU, Interruption(), None, 0), fresh=fresh)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the passive party has fitted its model, and which none changes."""
    folder = tmp_path_factory.mktemp("fitted")
    write(folder, MANY)
    fit(passive_settings(folder))
    return folder


@pytest.fixture
def folder(fitted: Path, tmp_path: Path) -> Path:
    return copytree(fitted, tmp_path / "own")


@contextmanager
def serving(settings: PassiveSettings) -> Iterator[tuple[InferenceService, str]]:
    place = settings.run_folder("passive") / "serve"
    place.mkdir(exist_ok=True)
    status, address = InferenceStatus(settings.party, settings.contract), free_address()
    with Transcript(place, settings.party) as transcript:
        service = serve._service(settings, status, None)
        notes = AllNotes(transcript, status)
        with InferenceServer(service, settings.contract, address, notes=notes):
            yield service, address


class Trained(NamedTuple):
    session: ActiveSession
    seen: ActiveRecording
    weights: dict[str, Tensor]


def train(settings: ActiveSettings) -> Trained:
    """Do as the active party's ``run`` does, without the pages."""
    at, seen = settings.run_folder("active"), ActiveRecording()
    at.mkdir(parents=True, exist_ok=True)
    with RunStore(at) as store:
        session, builder = assemble_active(settings, seen, device=CPU, store=store)
        session.reopen()
        data, status = PartyData.of(settings), ActiveStatus(settings)
        checked_table(settings)(session, data, at, None, status, Interruption())
        save_results(settings, at, session, builder)
    trainer = session.lifecycle.answering.trainer
    return Trained(session, seen, trainer.model.state_dict())


class Held(NamedTuple):
    """What the passive party's process has sent, received, counted and written."""

    messages: list[tuple[str, str, int]]
    counts: dict[str, int]
    files: dict[str, Any]
    error: str


def held_after(folder: Path, ids: Sequence[str]) -> Held:
    write(folder, ids)
    settings, error = passive_settings(folder), ""
    with serving(settings) as (service, address):
        try:
            train(active_settings(folder, address))
        except AlignmentError as failed:
            error = str(failed)
    at = settings.run_folder("passive")
    lines = (at / "serve/transcript.jsonl").read_text().splitlines()
    crossed = [line for line in map(json.loads, lines) if "direction" in line]
    messages = [(line["direction"], line["kind"], line["bytes"]) for line in crossed]
    files = {
        str(path.relative_to(at.parent)): path.read_bytes()
        for path in sorted(at.parent.rglob("*"))
        if path.is_file() and "active" not in str(path.relative_to(at.parent))
        if path.name != "transcript.jsonl"
    }
    return Held(messages, dict(service.answered), files, error)


def test_the_passive_party_sees_the_same_whichever_ids_are_common(
    fitted: Path, tmp_path: Path
) -> None:
    many, few, none = (
        held_after(copytree(fitted, tmp_path / name), ids)
        for name, ids in (("many", MANY), ("few", FEW), ("none", NONE))
    )
    assert not many.error
    for other in (few, none):
        assert "too few ids to train on" in other.error
        assert other[:3] == many[:3]
    assert many.counts["ids"] == len(MANY) == 250
    assert {kind for _, kind, _ in many.messages} == {
        f"{call} {side}" for call in ("Describe", "EmbedTable") for side in ("request", "reply")
    }
    assert any(name.endswith("tried-ids") for name in many.files)


def test_with_the_ordinary_alignment_it_sees_which_ids_are_common(tmp_path: Path) -> None:
    held = {}
    for name, ids in (("many", MANY), ("fewer", OURS[:150] + STRANGERS[:100])):
        (tmp_path / name).mkdir()
        write(tmp_path / name, ids, alignment={"min_aligned": 20})
        parties = build_parties(tmp_path / name)
        parties.simulation().meet()
        assert parties.run.trainer is not None
        held[name] = parties.run.trainer.num_rows
    assert held == {"many": 200, "fewer": 150}


def test_requests_hold_no_id_and_are_fresh_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []
    decode = inference_codec.decode_points

    def noting(points: bytes, expected: int | None = None) -> bytes:
        heard.append(points)
        return decode(points, expected)

    monkeypatch.setattr("splitveil.passive_party.predict.service.decode_points", noting)
    settings = passive_settings(folder)
    with serving(settings) as (_, address):
        own = active_settings(folder, address)
        train(own)
        with open_predictor(own, CPU) as predictor:
            predictor.check_models()
            predictor.take_tables(MANY)
            assert predictor.predict(MANY).found.sum() == 200
    points = b"".join(heard)
    each = {points[at : at + 32] for at in range(0, len(points), 32)}
    assert len(each) == 2 * len(MANY)  # the second time is no repetition of the first
    plain = ristretto.load().hash_to_group(ristretto.digest_ids(MANY))
    assert not any(plain[at : at + 32] in each for at in range(0, len(plain), 32))


# ---- a row that cannot be read ----


def spoil(monkeypatch: pytest.MonkeyPatch, of_nan: str, of_wrong_key: str) -> None:
    """Let the passive party send two rows that cannot be read, to see what follows from it."""
    seal, secrets_of = inference_codec.seal, served_model.SealedTable._secrets_of
    owner: dict[inference_codec.Secret, str] = {}

    def noting(self: Any, number: int) -> Any:
        found = secrets_of(self, number)
        owner.update(zip(found, self._model.rows.ids_at(self._chunks[number]), strict=True))
        return found

    def spoilt(secrets: Any, values: Any, limits: Any) -> pb.TableReply:
        owners = [owner[secret] for secret in secrets]
        is_nan = np.array([text == of_nan for text in owners])[:, None]
        keys = [
            secret._replace(key=bytes(32)) if text == of_wrong_key else secret
            for text, secret in zip(owners, secrets, strict=True)
        ]
        return seal(keys, np.where(is_nan, np.float32(np.nan), values), limits)

    monkeypatch.setattr(served_model, "seal", spoilt)
    monkeypatch.setattr(served_model.SealedTable, "_secrets_of", noting)


def test_a_row_that_cannot_be_read_tells_the_passive_party_nothing(
    fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that ended there, or a second one, would say that the row's id is common."""
    held = []
    for name, spoilt in (("common", OURS[:2]), ("others", OURS[-2:])):
        with monkeypatch.context() as patched:
            spoil(patched, *spoilt)
            held.append(held_after(copytree(fitted, tmp_path / name), MANY))
    assert held[0] == held[1]
    assert not held[0].error
    assert caplog.text.count("2 rows of passive party 'passive' cannot be read") == 1


# ---- limits, faults, restarts ----


def test_no_more_ids_can_be_tried_than_agreed_whatever_is_restarted(folder: Path) -> None:
    settings = passive_settings(folder, "alignment_attempts=1")  # 500 ids in all
    for number in range(3):
        with serving(settings) as (service, address):
            own = active_settings(folder, address, "contract.run_name=small")
            with open_client(own) as client:
                if number < 2:
                    client.take(MANY, lambda: None)
                else:
                    with pytest.raises(AlignmentError):
                        client.take(MANY[:1], lambda: None)
                    assert service.refused == {"AlignmentError": 1}


def open_client(settings: ActiveSettings) -> Any:

    (client,) = open_clients(settings, TableClient, None)
    client.check_model()
    return client


def test_another_model_is_refused(folder: Path) -> None:
    settings = passive_settings(folder)
    with serving(settings) as (_, address):
        train(active_settings(folder, address))
    fit(settings, fresh=True)
    with (
        serving(settings) as (_, address),
        open_predictor(active_settings(folder, address), CPU) as predictor,
        pytest.raises(OtherModel),
    ):
        predictor.check_models()


def test_another_contract_is_refused(folder: Path) -> None:
    with (
        serving(passive_settings(folder)) as (_, address),
        pytest.raises(ContractMismatch, match="batch_size"),
    ):
        train(active_settings(folder, address, "contract.batch_size=32"))


def test_a_run_that_was_stopped_ends_with_the_same_bits_and_asks_for_no_second_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(passive_settings(folder)) as (_, address):
        whole = train(active_settings(folder, address))
    for stage in ("aligned", "leave"):
        with serving(passive_settings(folder)) as (_, address):
            own = active_settings(folder, address, f"runs_dir={folder / stage}")
            with monkeypatch.context() as patched:
                patched.setattr(ActiveSession, stage, killed)
                with pytest.raises(KeyboardInterrupt):
                    train(own)
        again = train(own)  # nobody serves
        assert all(torch.equal(again.weights[name], one) for name, one in whole.weights.items())
        assert again.session.run_id == whole.session.run_id


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_check_connects_the_way_that_a_run_does(folder: Path) -> None:
    """The active party calls; at ``listen``, nobody is ever called."""
    with serving(passive_settings(folder)) as (_, address):
        own = "splitveil check --connect active.yaml"
        own += f" --set inference.connect.passive={address}"
        done = called(folder, own)
    assert done.exit_code == 0, done.output
    assert "ok: inference.connect: the sealed table of run " in done.output
    assert called(folder, own).exit_code == PeerUnreachable.exit_code
    done = called(folder, "splitveil check --connect passive.yaml")
    assert done.exit_code == SettingsError.exit_code
    assert "have the active party check --connect" in done.output


def test_a_passive_party_that_is_away_is_waited_for(folder: Path) -> None:
    with pytest.raises(PeerUnreachable, match="has not answered"):
        train(active_settings(folder, free_address()))


def test_a_table_beyond_the_agreed_size_is_not_fitted(tmp_path: Path) -> None:
    write(tmp_path, MANY, alignment={**ALIGNMENT, "max_set_size": 100})
    with pytest.raises(AlignmentError, match="expected 1 to 100 own ids"):
        fit(passive_settings(tmp_path))


def test_a_column_of_the_active_party_alone_splits_the_rows(tmp_path: Path) -> None:
    write(tmp_path, MANY, split={"kind": "column", "column": "part"})
    lines = (tmp_path / "active.csv").read_text().splitlines()
    parts = ["part", *(("test", "train")[number % 4 > 0] for number in range(len(MANY)))]
    rows = (f"{line},{part}" for line, part in zip(lines, parts, strict=True))
    (tmp_path / "active.csv").write_text("\n".join([*rows, ""]))
    fit(passive_settings(tmp_path))
    with serving(passive_settings(tmp_path)) as (_, address):
        trained = train(active_settings(tmp_path, address))
    splits = trained.session.lifecycle.answering.rows.splits
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [150, 0, 50]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"exchange": "gradients"}, "needs exchange: one_shot"),
        ({"release": "noisy_labels"}, "would name the common rows"),
        ({"passive_parties": ["a", "b"]}, "a single passive party"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Contract.model_validate(ONE_SHOT | changed)
