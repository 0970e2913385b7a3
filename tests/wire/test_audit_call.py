"""Audits, in process and over the real wire: the figure, and every limit to it."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import torch

from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.run import audit_service
from splitveil.active_party.run.audit_service import MAX_LAYERS
from splitveil.active_party.run.preparation import OwnRows, OwnRules
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import (
    AuditRefused,
    InvalidMessage,
    OutOfStep,
    ProtocolError,
    SettingsError,
    TooLarge,
)
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.privacy.attacks import LABEL_FREE
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.privacy.observation import Observation
from splitveil.common.privacy.settings import DEFAULT_ATTACKS
from splitveil.common.run.messages import AuditQuestion
from splitveil.common.run.sample_order import positions_digest
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.small_messages import encode_question
from splitveil.passive_party.label_free_audit import LabelFreeAudit
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb
from tests.support.recorded import recorders
from tests.support.runs import (
    Parties,
    build_parties,
    run_in_process,
    run_over_grpc,
    serving,
    write_example,
)

ALLOWED = "contract.audits_allowed=true"
NOISY = "defense={name: marvell, strength: {power_ratio: 4}, insecure_noise_seed: 1}"
ROWS = 1000  # 9 in 10 common, 6 in 10 of those trained on, 3 in 10 of those positive
FEWEST = 100
LARGE = "contract.batch_size=512"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder, rows=ROWS)
    return folder


@pytest.fixture(autouse=True)
def small_tables_are_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are, in tests/system/test_audit_call.py."""
    assert audit_service.MIN_EXAMPLES == 1000
    monkeypatch.setattr(audit_service, "MIN_EXAMPLES", FEWEST)


def parties_with(example: Path, *active: str) -> Parties:
    return build_parties(example, [ALLOWED, LARGE, *active], [ALLOWED, LARGE])


class Audited(NamedTuple):
    parties: Parties
    active: list[dict[str, Any]]
    passive: list[dict[str, Any]]
    summary: dict[str, Any]

    def of_kind(self, party: str, kind: str) -> list[dict[str, Any]]:
        return [line for line in getattr(self, party) if line["kind"] == kind]


def audited(example: Path, folder: Path, meet: Callable[[Parties], None], *active: str) -> Audited:
    """Run both parties with their recorders; the passive party knows no label."""
    mine = [ALLOWED, LARGE, "adversary={audit: true, queue_batches: 512, max_cpu_share: null}"]
    parties = build_parties(example, [ALLOWED, LARGE, NOISY, *active], mine)
    with recorders(parties, folder) as both:
        parties.run.auditor = both.passive
        meet(parties)
    return Audited(parties, *both.lines(), both.passive.summary().form())


def meeting(wire: str, port: int) -> Callable[[Parties], None]:
    return (lambda parties: run_over_grpc(parties, port)) if wire == "gRPC" else run_in_process


@pytest.mark.parametrize("wire", ["in process", "gRPC"])
def test_an_audit_gives_the_monitor_s_figure_with_two_digits(
    example: Path, tmp_path: Path, port: int, wire: str
) -> None:
    found = audited(example, tmp_path, meeting(wire, port), "allow_audits=true")
    measured = {
        line["epoch"]: line["cut/accumulated_spectral"]
        for line in found.of_kind("active", "epoch_leak")
    }
    answered = {
        line["epoch"]: line["cut/accumulated_spectral"]
        for line in found.of_kind("passive", "audit")
        if "cut/accumulated_spectral" in line
    }
    assert answered == {epoch: round(value, 2) for epoch, value in measured.items()}
    assert set(answered) == {0, 1}
    assert all(0.55 < value < 1 for value in answered.values())
    assert len(found.of_kind("passive", "audit")) == 2 * 5 * 2  # epochs, attacks, layers
    assert set(found.summary["audit"]) == {"cut", "first"}
    assert set(found.summary["audit"]["cut"]) == set(LABEL_FREE) & set(DEFAULT_ATTACKS)
    assert found.summary["audit"]["cut"]["accumulated_spectral"] == answered[1]
    assert found.summary["audit_left_out_batches"] == 0
    assert len(found.of_kind("active", "audit")) == 20


def test_a_refused_audit_ends_no_run_and_is_asked_for_once(
    example: Path, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Allowed by the contract only: off by default."""
    with caplog.at_level(logging.WARNING):
        found = audited(example, tmp_path, meeting("gRPC", port))
    assert found.parties.session.stage is Stage.FINISHED
    assert found.of_kind("passive", "audit") == found.of_kind("active", "audit") == []
    assert found.summary["audit"] == {}
    assert caplog.text.count("no audit") == 1


def test_attacks_that_fail_end_no_run(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(audit: LabelFreeAudit, observation: Observation) -> None:
        raise ValueError("no attack today")

    monkeypatch.setattr(LabelFreeAudit, "observe", fail)
    found = audited(example, tmp_path, run_in_process, "allow_audits=true")
    assert found.parties.session.stage is Stage.FINISHED
    assert found.summary["audit"] == {}
    assert found.summary["audit_left_out_batches"] == found.summary["steps"]
    assert "no attack today" in caplog.text


# ---- the limits, on a session whose last epoch can still be audited ----


def finished(example: Path, *active: str) -> Parties:
    parties = parties_with(example, *active)
    run_in_process(parties)
    return parties


@pytest.fixture
def open_session(example: Path) -> Parties:
    return finished(example, "allow_audits=true")


def question(parties: Parties, **changes: Any) -> AuditQuestion:
    assert parties.active.rows is not None
    rows = parties.active.rows.splits["train"]
    scores = torch.rand(len(rows), generator=torch.Generator().manual_seed(5))
    asked = AuditQuestion(parties.session.run_id, 1, "norm", "cut", positions_digest(rows), scores)
    return dataclasses.replace(asked, **changes)


def true_labels(parties: Parties) -> torch.Tensor:
    assert parties.active.rows is not None
    assert parties.session.lifecycle.phase.trainer is not None
    return parties.session.lifecycle.phase.trainer.labels_of(parties.active.rows.splits["train"])


def test_an_inverted_score_is_a_leak_and_two_digits_are_given(open_session: Parties) -> None:
    noise = torch.rand(len(true_labels(open_session)), generator=torch.Generator().manual_seed(1))
    scores = noise - 0.4 * true_labels(open_session)
    exact = leak_auc(scores, true_labels(open_session))
    answer = open_session.session.audit(question(open_session, scores=scores))
    assert answer == round(exact, 2)
    assert answer != exact
    assert answer > 0.7


def test_other_scores_in_the_same_epoch_are_refused(open_session: Parties) -> None:
    session, asked = open_session.session, question(open_session)
    first = session.audit(asked)
    with pytest.raises(OutOfStep, match="other bytes"):
        session.audit(dataclasses.replace(asked, scores=asked.scores.flip(0)))
    assert session.audit(asked) == first  # the peer may have lost the answer
    session.audit(dataclasses.replace(asked, attack="spectral"))
    session.audit(dataclasses.replace(asked, layer="first"))


def spoilt(parties: Parties) -> list[tuple[type[ProtocolError], dict[str, Any]]]:
    scores = question(parties).scores
    with_nan, with_infinity = scores.clone(), scores.clone()
    with_nan[3], with_infinity[3] = torch.nan, torch.inf
    return [
        (OutOfStep, {"run_id": "another"}),
        (OutOfStep, {"epoch": 0}),
        (OutOfStep, {"epoch": 2}),
        (OutOfStep, {"positions_digest": b"0" * 16}),
        (InvalidMessage, {"attack": "cosine"}),
        (InvalidMessage, {"attack": "norm2"}),
        (InvalidMessage, {"layer": ""}),
        (InvalidMessage, {"layer": "x" * 65}),
        (InvalidMessage, {"scores": scores[1:]}),
        (InvalidMessage, {"scores": scores.double()}),
        (InvalidMessage, {"scores": with_nan}),
        (InvalidMessage, {"scores": with_infinity}),
    ]


def test_whatever_breaks_a_limit_is_refused_and_takes_nothing_away(open_session: Parties) -> None:
    for error, changes in spoilt(open_session):
        with pytest.raises(error):
            open_session.session.audit(question(open_session, **changes))
    assert open_session.active.audits == []
    open_session.session.audit(question(open_session))


def test_made_up_layers_give_no_further_questions(open_session: Parties) -> None:
    for number in range(MAX_LAYERS):
        open_session.session.audit(question(open_session, layer=f"layer{number}"))
    with pytest.raises(TooLarge):
        open_session.session.audit(question(open_session, layer="one-more"))


@pytest.mark.parametrize("active", [[ALLOWED], [], ["allow_audits=true", ALLOWED]])
def test_both_the_contract_and_the_label_owner_must_allow_audits(
    example: Path, active: list[str]
) -> None:
    contract = [text for text in active if text.startswith("contract.")]
    parties = build_parties(example, active, contract)
    run_in_process(parties)
    if "allow_audits=true" in active:
        parties.session.audit(question(parties))
    else:
        with pytest.raises(AuditRefused, match="forbids"):
            parties.session.audit(question(parties))


def test_the_desk_looks_at_the_contract_itself(example: Path) -> None:
    """Even where settings that contradict it have come through."""
    parties = build_parties(example)
    session = ActiveSession(
        parties.run.contract,
        OwnRows(parties.session.ids),
        parties.session.preparation.build_trainer,
        parties.active,
        lambda: parties.session.lifecycle.run.nonce,
        OwnRules(allow_audits=True),
    )
    parties.session = session
    run_in_process(parties)
    with pytest.raises(AuditRefused):
        session.audit(question(parties))


def test_fewer_training_rows_of_a_class_are_not_measured(tmp_path: Path) -> None:
    write_example(tmp_path, rows=450)
    parties = finished(tmp_path, "allow_audits=true")
    assert FEWEST / 2 < true_labels(parties).sum() < FEWEST < (1 - true_labels(parties)).sum()
    with pytest.raises(AuditRefused, match=f"{FEWEST} of each of two classes"):
        parties.session.audit(question(parties))
    assert parties.session.lifecycle.phase.audits_answered == 0


def test_before_an_epoch_is_over_there_is_nothing_to_audit(example: Path) -> None:
    parties = parties_with(example, "allow_audits=true")
    outcomes: list[str] = []

    def ask(epoch: int) -> None:
        for asked in (0, 1):
            try:
                parties.session.audit(question(parties, epoch=asked))
                outcomes.append(f"after {epoch}: {asked} answered")
            except OutOfStep:
                outcomes.append(f"after {epoch}: {asked} refused")

    parties.passive.on_epoch = ask  # type: ignore[method-assign]
    run_in_process(parties)
    assert outcomes == [
        "after 0: 0 answered",
        "after 0: 1 refused",
        "after 1: 0 refused",
        "after 1: 1 answered",
    ]


@pytest.mark.parametrize(
    ("settings", "file", "overrides"),
    [
        (ActiveSettings, "active.yaml", ["allow_audits=true"]),
        (PassiveSettings, "passive.yaml", ["adversary.audit=true"]),
        (PassiveSettings, "passive.yaml", [ALLOWED, "adversary={audit: true, attacks: [cosine]}"]),
    ],
)
def test_audits_that_cannot_be_meant_are_refused(
    example: Path, settings: Any, file: str, overrides: list[str]
) -> None:
    with pytest.raises(SettingsError, match=r"audits_allowed|expected at least one of"):
        load_party_settings(settings, example / file, overrides)


# ---- the same over the wire ----


def ask(port: int, request: bytes) -> pb.AuditReply:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = channel.unary_unary(method_path("Audit"))
        return pb.AuditReply.FromString(stub(request, timeout=60))


def code_of(port: int, request: bytes) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        ask(port, request)
    status: grpc.StatusCode = caught.value.code()
    return status


CODES: dict[type[ProtocolError], grpc.StatusCode] = {
    OutOfStep: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidMessage: grpc.StatusCode.INVALID_ARGUMENT,
}


@pytest.fixture
def service(open_session: Parties, port: int) -> Iterator[ActiveService]:
    with serving(open_session, port) as service:
        yield service


def test_limits_hold_over_the_wire_and_harm_nothing(
    open_session: Parties, service: ActiveService, port: int
) -> None:
    whole = encode_question(question(open_session))
    for error, changes in spoilt(open_session):
        if changes.get("scores", whole) is whole or changes["scores"].dtype == torch.float32:
            request = encode_question(question(open_session, **changes))
            assert code_of(port, request.SerializeToString()) is CODES[error]
    for wrong in (b"", whole.scores[:-1]):
        request = encode_question(question(open_session))
        request.scores = wrong
        assert code_of(port, request.SerializeToString()) is grpc.StatusCode.INVALID_ARGUMENT
    too_large = encode_question(question(open_session, scores=torch.zeros(500_000)))
    assert code_of(port, too_large.SerializeToString()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    reply = ask(port, whole.SerializeToString())
    scores = question(open_session).scores
    assert reply.leak_auc_percent == round(100 * leak_auc(scores, true_labels(open_session)))
    assert ask(port, whole.SerializeToString()) == reply
    other = encode_question(question(open_session, scores=scores.flip(0)))
    assert code_of(port, other.SerializeToString()) is grpc.StatusCode.FAILED_PRECONDITION
    assert len(open_session.active.audits) == 1
    assert open_session.session.lifecycle.error is None
