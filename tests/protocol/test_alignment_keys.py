"""Where keys are kept, and when that is refused."""

from pathlib import Path

import pytest

from splitveil.common.alignment import records_of
from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.contract import AlignmentContract, Contract
from splitveil.common.settings import validate
from splitveil.passive_party.settings import PassiveSettings
from tests.runs import CONTRACT, write_example

KEEPING = "contract.alignment.keep_key=true"


def settings_of(folder: Path, *overrides: str) -> PassiveSettings:
    write_example(folder, rows=60)
    return load_party_settings(PassiveSettings, folder / "passive.yaml", list(overrides))


def contract_of(alignment: dict[str, object]) -> Contract:
    return validate(Contract, CONTRACT | {"alignment": alignment}, "contract.yaml")


def test_both_parties_have_to_agree_on_keeping_the_key() -> None:
    keeping, forgetting = contract_of({"keep_key": True}), contract_of({})
    for one, other in ((keeping, forgetting), (forgetting, keeping)):
        assert one.fields_differing_from(other.canonical_json()) == ["alignment.keep_key"]
        assert one.digest() != other.digest()
    assert AlignmentContract.of(keeping).alignment == keeping.alignment


def test_by_default_no_key_is_kept(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    records = records_of(settings, "passive", tmp_path / "runs" / "small" / "passive")
    assert records.kept.of("active").key is None
    assert not (tmp_path / "alignment-keys").exists()


def test_keys_lie_beside_the_settings_and_one_process_at_a_time_uses_them(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, KEEPING, "alignment_keys=a/b")
    folder = tmp_path / "runs" / "small" / "passive"
    records = records_of(settings, "passive", folder)
    assert records.kept.of("active").key is not None
    for path in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "passive"):
        assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(SettingsError, match="another process uses the keys"):
        records_of(settings, "passive", folder)


def test_a_folder_for_keys_that_others_could_read_is_closed(tmp_path: Path) -> None:
    keys = tmp_path / "alignment-keys" / "passive"
    keys.mkdir(parents=True)
    keys.chmod(0o755)
    records_of(settings_of(tmp_path, KEEPING), "passive", tmp_path / "runs" / "passive")
    assert keys.stat().st_mode & 0o777 == 0o700


def test_a_folder_for_keys_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "alignment-keys").write_text("a file")
    with pytest.raises(StorageError, match="alignment-keys"):
        records_of(settings_of(tmp_path, KEEPING), "passive", tmp_path / "runs" / "passive")
