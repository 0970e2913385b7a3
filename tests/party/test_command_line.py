"""How commands report their end: messages and exit codes."""

import logging
from pathlib import Path

import pytest

from splitveil.active_party.report import page
from splitveil.common.errors import PeerLeft, PeerUnreachable, SettingsError, StorageError
from splitveil.common.models.settings import MlpModel
from splitveil.common.party.arguments import exit_code_of
from splitveil.common.settings import apply_overrides, validate
from splitveil.passive_party.settings import PassiveSettings


def lose_the_peer() -> None:
    try:
        raise PeerUnreachable("one attempt failed")
    except PeerUnreachable as error:
        raise PeerUnreachable("the peer is gone") from error


def lose_the_peer_and_fill_the_disk() -> None:
    try:
        lose_the_peer()
    finally:
        try:
            raise OSError("disk full")
        except OSError as error:
            raise StorageError("the model cannot be written") from error


def test_the_exit_code_is_the_error_s_and_its_cause_is_not_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert exit_code_of(lose_the_peer) == 4
    assert caplog.messages == ["the peer is gone"]


def test_a_full_disk_does_not_hide_why_the_run_ended(caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code_of(lose_the_peer_and_fill_the_disk) == 1
    assert caplog.messages == ["the peer is gone", "the model cannot be written"]


def test_each_line_of_an_error_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise PeerLeft("first\nsecond")

    with caplog.at_level(logging.ERROR):
        assert exit_code_of(fail) == 4
    assert caplog.messages == ["first", "second"]


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (True, "true"), (0, "0"), ("tanhh", "'tanhh'")]
)
def test_a_refused_setting_is_shown_as_the_file_writes_it(value: object, shown: str) -> None:
    with pytest.raises(SettingsError) as caught:
        validate(MlpModel, {"kind": "mlp", "activation": value}, "active.yaml")
    assert str(caught.value).endswith(f"(got {shown})")


@pytest.mark.parametrize(
    "override",
    [
        "connect=https://word-3391@proxy:3128",
        "connect=word:3391@host:50051",
        "connect=host:word:50051?token=3391",
        "connect={password: 3391",
        "data.store.secret_key: word-3391",
        "model_seed.secret_key=3391",
    ],
)
def test_an_error_never_repeats_what_may_be_a_password(override: str) -> None:
    values = {"connect": "host:50051", "model_seed": 1}
    with pytest.raises(SettingsError) as caught:
        validate(PassiveSettings, apply_overrides(values, [override]), "passive.yaml")
    assert "not shown" in str(caught.value)
    assert "3391" not in str(caught.value)


def test_a_report_that_finds_no_room_is_one_line_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def full(_: Path) -> Path:
        raise StorageError("report.html: cannot be written: No space left on device")

    monkeypatch.setattr(page, "write_report", full)
    page.try_to_report(tmp_path)
    (record,) = caplog.records
    expected = "No space left on device; once the cause is gone: splitveil active report"
    assert expected in record.message
    assert record.exc_info is None
