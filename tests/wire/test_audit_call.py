"""Audits, in process and over the real wire: the figure, and every limit to it."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import torch
from grpc import StatusCode

from splitveil.active_party.run import audit_service
from splitveil.active_party.run.preparation import OwnRows, OwnRules
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import AuditRefused, OutOfStep, SettingsError
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
from tests.support.loopback import serving
from tests.support.recorders import recorders
from tests.support.runs import Parties, build_parties, run_in_process, run_over_grpc, write_example

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
    """As large ones are, in tests/run/test_audit_oracle.py."""
    assert audit_service.MIN_EXAMPLES == 1000
    monkeypatch.setattr(audit_service, "MIN_EXAMPLES", FEWEST)


class Audited(NamedTuple):
    parties: Parties
    active: list[dict[str, Any]]
    passive: list[dict[str, Any]]
    summary: dict[str, Any]

    def of_kind(self, party: str, kind: str) -> list[dict[str, Any]]:
        return [line for line in getattr(self, party) if line["kind"] == kind]


def audited(example: Path, folder: Path, port: int, *active: str) -> Audited:
    """Run both parties with their recorders; the passive party knows no label."""
    mine = [ALLOWED, LARGE, "adversary={audit: true, queue_batches: 512, max_cpu_share: null}"]
    parties = build_parties(example, [ALLOWED, LARGE, NOISY, *active], mine)
    with recorders(parties, folder) as both:
        parties.run.auditor = both.passive
        run_over_grpc(parties, port)
    return Audited(parties, *both.lines(), both.passive.summary().form())


def test_an_audit_gives_the_monitor_s_figure_with_two_digits(
    example: Path, tmp_path: Path, port: int
) -> None:
    found = audited(example, tmp_path, port, "allow_audits=true")
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
        found = audited(example, tmp_path, port)
    assert found.parties.session.stage is Stage.FINISHED
    assert found.of_kind("passive", "audit") == found.of_kind("active", "audit") == []
    assert found.summary["audit"] == {}
    assert caplog.text.count("no audit") == 1


def test_attacks_that_fail_end_no_run(
    example: Path,
    tmp_path: Path,
    port: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(audit: LabelFreeAudit, observation: Observation) -> None:
        raise ValueError("no attack today")

    monkeypatch.setattr(LabelFreeAudit, "observe", fail)
    found = audited(example, tmp_path, port, "allow_audits=true")
    assert found.parties.session.stage is Stage.FINISHED
    assert found.summary["audit"] == {}
    assert found.summary["audit_left_out_batches"] == found.summary["steps"]
    assert "no attack today" in caplog.text


@pytest.fixture
def open_session(example: Path) -> Parties:
    parties = build_parties(example, [ALLOWED, LARGE, "allow_audits=true"], [ALLOWED, LARGE])
    run_in_process(parties)
    return parties


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


def spoilt(parties: Parties) -> list[tuple[StatusCode, dict[str, Any]]]:
    out_of_step, invalid = StatusCode.FAILED_PRECONDITION, StatusCode.INVALID_ARGUMENT
    scores = question(parties).scores
    with_nan, with_infinity = scores.clone(), scores.clone()
    with_nan[3], with_infinity[3] = torch.nan, torch.inf
    return [
        (out_of_step, {"run_id": "another"}),
        (out_of_step, {"epoch": 0}),
        (out_of_step, {"epoch": 2}),
        (out_of_step, {"positions_digest": b"0" * 16}),
        (invalid, {"attack": "cosine"}),
        (invalid, {"attack": "norm2"}),
        (invalid, {"layer": ""}),
        (invalid, {"layer": "x" * 65}),
        (invalid, {"scores": scores[1:]}),
        (invalid, {"scores": with_nan}),
        (invalid, {"scores": with_infinity}),
    ]


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        (ActiveSettings, ["allow_audits=true"]),
        (PassiveSettings, ["adversary.audit=true"]),
        (PassiveSettings, [ALLOWED, "adversary={audit: true, attacks: [cosine]}"]),
    ],
)
def test_audits_that_cannot_be_meant_are_refused(
    example: Path, settings: Any, overrides: list[str]
) -> None:
    file = example / ("active.yaml" if settings is ActiveSettings else "passive.yaml")
    with pytest.raises(SettingsError, match=r"audits_allowed|expected at least one of"):
        load_party_settings(settings, file, overrides)


@pytest.mark.parametrize("allowed", [[], [ALLOWED]])
def test_both_the_contract_and_the_label_owner_must_allow_audits(
    example: Path, allowed: list[str]
) -> None:
    parties = build_parties(example, allowed, allowed)
    run_in_process(parties)
    with pytest.raises(AuditRefused, match="forbids"):
        parties.session.audit(question(parties))


def test_the_service_looks_at_the_contract_itself(example: Path) -> None:
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


def test_before_an_epoch_is_over_there_is_nothing_to_audit(example: Path) -> None:
    parties = build_parties(example, [ALLOWED, LARGE, "allow_audits=true"], [ALLOWED, LARGE])
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


def asked(port: int, request: pb.AuditRequest) -> pb.AuditReply | StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = channel.unary_unary(method_path("Audit"))
        try:
            return pb.AuditReply.FromString(stub(request.SerializeToString(), timeout=60))
        except grpc.RpcError as error:
            code: StatusCode = error.code()
            return code


def test_limits_hold_over_the_wire_and_harm_nothing(open_session: Parties, port: int) -> None:
    labels = true_labels(open_session)
    noise = torch.rand(len(labels), generator=torch.Generator().manual_seed(1))
    scores = noise - 0.4 * labels  # an inverted score is a leak as well
    whole = question(open_session, scores=scores)

    def changed(**changes: Any) -> pb.AuditRequest:
        return encode_question(dataclasses.replace(whole, **changes))

    with serving(open_session, port):
        for code, changes in spoilt(open_session):
            assert asked(port, changed(**changes)) is code
        for wrong in (b"", changed().scores[:-1]):
            request = changed()
            request.scores = wrong
            assert asked(port, request) is StatusCode.INVALID_ARGUMENT
        too_large = changed(scores=torch.zeros(500_000))
        assert asked(port, too_large) is StatusCode.RESOURCE_EXHAUSTED
        assert open_session.active.audits == []
        percent = round(100 * leak_auc(scores, labels))
        assert percent > 70
        for _ in range(2):  # the peer may have lost the answer
            assert asked(port, changed()) == pb.AuditReply(leak_auc_percent=percent)
        assert len(open_session.active.audits) == 1
        other = scores.flip(0)
        assert asked(port, changed(scores=other)) is StatusCode.FAILED_PRECONDITION
        for fresh in ({"attack": "spectral"}, {"layer": "first"}):
            assert isinstance(asked(port, changed(scores=other, **fresh)), pb.AuditReply)
    assert open_session.session.lifecycle.error is None
