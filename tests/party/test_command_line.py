"""How commands report their end: messages and exit codes."""

import pytest

from splitveil.common.errors import PeerUnreachable, SettingsError, StorageError
from splitveil.common.models.settings import MlpModel
from splitveil.common.party.arguments import exit_code_of
from splitveil.common.settings import apply_overrides, validate
from splitveil.passive_party.settings import PassiveSettings


def lose_the_peer_and_fill_the_disk() -> None:
    try:
        try:
            raise PeerUnreachable("one attempt failed")
        except PeerUnreachable as error:
            raise PeerUnreachable("the peer\nis gone") from error
    finally:
        try:
            raise OSError("disk full")
        except OSError as error:
            raise StorageError("the model cannot be written") from error


def test_a_full_disk_does_not_hide_why_the_run_ended(caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code_of(lose_the_peer_and_fill_the_disk) == 1
    # Each line of an error is a line of the log, and its cause is not repeated.
    assert caplog.messages == ["the peer", "is gone", "the model cannot be written"]


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
