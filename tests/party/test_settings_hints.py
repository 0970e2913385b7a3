"""Misspelt and misplaced settings are answered with the name, and the section, that was meant."""

import pytest

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.settings import closest_setting, validate
from splitveil.deploy.overrides import refuse_unknown_settings


@pytest.mark.parametrize(
    ("where", "meant"),
    [
        (["insecure_noise_seed"], "defense.insecure_noise_seed"),
        (["insecure_nonce_sed"], "insecure_nonce_seed"),
        (["optimizer", "adam", "learning_rat"], "optimizer.learning_rate"),
        (["run_name"], "contract.run_name"),
        (["data", "learning_rate"], "optimizer.learning_rate"),
        (["xyzzy"], None),
    ],
)
def test_the_closest_setting_is_found_in_any_section(where: list[str], meant: str | None) -> None:
    assert closest_setting(ActiveSettings, where) == meant


def test_the_message_has_a_dotted_name_only_for_another_section() -> None:
    with pytest.raises(SettingsError) as refused:
        validate(ActiveSettings, {"insecure_noise_seed": 1, "insecure_nonce_sed": 1}, "a.yaml")
    message = str(refused.value)
    assert (
        "insecure_noise_seed: unknown setting; did you mean 'defense.insecure_noise_se" in message
    )
    assert "insecure_nonce_sed: unknown setting; did you mean 'insecure_nonce_seed'?" in message


def test_the_launcher_names_the_party_too() -> None:
    overrides = ("active.insecure_noise_seed=1", "passive_a.conect=x", "contract.epochs=1")
    with pytest.raises(SettingsError) as refused:
        refuse_unknown_settings((*overrides, "active.defense.anything=1", "passive.device=cpu"))
    noise_seed, connect = refused.value.problems
    assert noise_seed.startswith("--set active.insecure_noise_seed: unknown setting; ")
    assert noise_seed.endswith("did you mean 'active.defense.insecure_noise_seed'?")
    assert connect.endswith("passive_a.conect: unknown setting; did you mean 'passive_a.connect'?")
