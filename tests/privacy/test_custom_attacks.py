"""User-defined attacks: their side information, their figures, and refusals."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from splitveil.active_party.commands import program as active_program
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.report import write_report
from splitveil.active_party.settings import LeakMonitorSettings
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.custom_attacks import load_custom_attacks, try_custom_attacks
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.privacy.observation import LabelClasses, Observation
from splitveil.common.privacy.settings import AuditSettings
from splitveil.common.record.run_folder import write_json_atomically
from splitveil.common.settings import validate
from tests.support.commands import exit_code_of
from tests.support.recorders import record
from tests.support.runs import build_parties, write_example

SEED = bytes(32)

MODULE = """
import torch

def energy(gradients):
    return gradients.flatten(1).double().square().sum(1)

def cosine(gradients, positive_gradient):
    rows, one = gradients.flatten(1).double(), positive_gradient.flatten().double()
    return rows @ one / rows.norm(dim=1) / one.norm()

def hint_distance(gradients, hints):
    assert len(hints) == 3
    return -torch.cdist(gradients.flatten(1).double(), hints.flatten(1).double()).amin(1)

def mean(gradients, classes):
    rows = gradients.flatten(1).double()
    centres = [known.flatten(1).double().mean(0) for known in classes]
    return (rows - centres[0]).norm(dim=1) - (rows - centres[1]).norm(dim=1)

def length_of_activation(gradients, activations):
    return activations.flatten(1).double().norm(dim=1)

def fails_later(gradients):
    if len(gradients) != 8:
        raise RuntimeError("as large as that")
    return gradients.flatten(1).sum(1)

def fails(gradients):
    raise LookupError("first line\\nsecond line")

def returns_list(gradients):
    return [0.0] * len(gradients)

def returns_matrix(gradients):
    return gradients.flatten(1)

def returns_nan(gradients):
    return gradients.flatten(1).sum(1) / 0 * 0

def changes(gradients):
    return gradients.mul_(2).flatten(1).sum(1)

def changes_hints(gradients, hints):
    hints.zero_()
    return gradients.flatten(1).sum(1)

def draws(gradients):
    return torch.rand(len(gradients))

constant = 3
"""


def own(function: str, **more: Any) -> dict[str, Any]:
    return {"kind": "custom", "module": f"own_attacks:{function}", "name": "mine"} | more


OWN = [
    own("energy", name="energy"),
    own("cosine", name="own-cosine", needs=["positive_gradient"]),
    own("hint_distance", name="own_hints", needs=["hints"], num_hints=3),
    own("mean", name="own_mean", needs=["classes"]),
]
BUILT_IN: dict[str, str] = {
    "energy": "norm",
    "own-cosine": "cosine",
    "own_hints": "hint_distance_3",
    "own_mean": "mean",
}


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "own_attacks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("own_attacks", None)


def settings_of(*attacks: object) -> AuditSettings:
    return validate(AuditSettings, {"attacks": list(attacks)}, "audit")


def observation(audit: LeakAudit, epoch: int, step: int, num_classes: int = 2) -> Observation:
    generator = torch.Generator().manual_seed(100 * epoch + step)
    labels = torch.randint(num_classes, (48,), generator=generator)
    weights = torch.randn(num_classes, 6, generator=torch.Generator().manual_seed(1))
    cut = weights[labels] + 0.8 * torch.randn(48, 6, generator=generator)
    layers = {"cut": cut, "first": torch.cat([cut, cut**2], dim=1)}
    positions = torch.arange(48) + 48 * step
    activations = torch.randn(48, 4, generator=generator) + labels[:, None]
    seen = Observation(epoch, step, layers, labels, positions=positions, activations=activations)
    return dataclasses.replace(seen, clues=audit.clues(seen, SEED, layers))


def new_audit(settings: AuditSettings, class_names: tuple[str, ...] = ()) -> LeakAudit:
    custom = load_custom_attacks(settings)
    return LeakAudit(settings.attack_names, 96, LabelClasses(class_names), custom)


@pytest.mark.parametrize("class_names", [(), ("a", "b", "c")])
def test_attacks_of_ones_own_get_what_they_declare(class_names: tuple[str, ...]) -> None:
    """Rewritten in the user's module, attacks of ours find the same, for every class."""
    settings = settings_of(*OWN, *BUILT_IN.values())
    audit = new_audit(settings, class_names)
    for mine, attack in load_custom_attacks(settings).items():  # an alarm passes over oracles
        assert attack.is_oracle is ATTACKS[BUILT_IN[mine]].is_oracle
    for step in range(2):
        measured = audit.observe(observation(audit, 0, step, len(class_names) or 2))
        assert measured is not None
        for layer in ("cut", "first"):
            for mine, built_in in BUILT_IN.items():
                found = measured.leak[layer]
                assert found[mine] == pytest.approx(found[built_in], abs=1e-12), mine
    for layer, attacks in audit.classes().items():
        for mine, built_in in BUILT_IN.items():
            assert attacks[mine].classes == pytest.approx(attacks[built_in].classes), layer


def test_activations_are_handed_over() -> None:
    chosen = own("length_of_activation", needs=["activations", "positives_are_fewer"])
    audit = new_audit(settings_of(chosen))
    seen = observation(audit, 0, 0)
    measured = audit.observe(seen)
    assert measured is not None
    assert seen.activations is not None
    expected = leak_auc(seen.activations.double().norm(dim=1), seen.labels)
    assert measured.leak["cut"]["mine"] == pytest.approx(expected, abs=1e-12)


def test_their_figures_stand_in_metrics_summary_and_report_under_their_name(tmp_path: Path) -> None:
    chosen = "attacks=[norm, {kind: custom, module: 'own_attacks:energy', name: own_energy}]"
    run = tmp_path / "run"
    parties = record(run, [f"leak_monitor.{chosen}"], [f"adversary.{chosen}"])
    for party in parties:
        figures = party.summary["leak"]["cut"]
        assert figures["own_energy"] == pytest.approx(figures["norm"], abs=1e-12)
        for line in party.of_kind("leak"):
            assert line["cut/own_energy_leak_auc"] == pytest.approx(line["cut/norm_leak_auc"])
        for line in party.of_kind("epoch_leak"):
            assert line["cut/own_energy"] == pytest.approx(line["cut/norm"])
    assert set(parties[1].summary["leak"]["first"]) == {"norm", "own_energy"}
    for name, party in zip(("active", "passive"), parties, strict=True):
        write_json_atomically(run / name / "summary.json", party.summary)
        (run / name / "settings.yaml").write_text("{}")
    assert "own_energy" in write_report(run, tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (own("energy", module="no_such_module:score"), "no_such_module cannot be imported"),
        (own("nothing"), "own_attacks has no function nothing"),
        (own("constant"), "expected a function, got int"),
        (own("fails"), "attack mine (own_attacks:fails): fails on 8 rows: LookupError: first line"),
        (own("energy", needs=["hints"]), "TypeError: energy() got an unexpected keyword argument"),
        (own("cosine"), "TypeError: cosine() missing 1 required"),
        (own("returns_list"), "expected a tensor of scores, got list"),
        (own("returns_matrix"), "for each of 8 rows, got torch.float32 of shape (8, 6)"),
        (own("returns_nan"), "expected scores without NaN"),
        (own("changes"), "changes its arguments"),
        (own("changes_hints", needs=["hints"]), "changes its arguments"),
        (own("draws"), "draws from torch's global generator"),
    ],
)
def test_what_cannot_score_is_refused_before_the_run(
    chosen: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    settings = settings_of("norm", chosen)
    with pytest.raises(SettingsError) as refused:
        try_custom_attacks(settings, (6,))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    write_example(tmp_path)
    parties = build_parties(tmp_path)
    monitor = LeakMonitorSettings(attacks=settings.attacks)
    of_party = parties.active_settings.model_copy(update={"leak_monitor": monitor})
    with pytest.raises(SettingsError):
        ActiveRecorder(of_party, tmp_path)


@pytest.mark.parametrize("shape", [(6,), (3, 4, 4)])
def test_what_can_score_passes(shape: tuple[int, ...]) -> None:
    activations = own("length_of_activation", needs=["activations"])
    state = torch.get_rng_state()
    assert try_custom_attacks(settings_of(*OWN, activations), shape) == [*BUILT_IN, "mine"]
    assert torch.equal(torch.get_rng_state(), state)
    assert try_custom_attacks(None, shape) == []


def test_one_that_fails_later_says_so_at_the_end(tmp_path: Path) -> None:
    chosen = "leak_monitor.attacks=[{kind: custom, module: 'own_attacks:fails_later', name: mine}]"
    with pytest.raises(
        SettingsError, match=r"attack mine .* rows: RuntimeError .* at own_attacks.py:25"
    ):
        record(tmp_path / "run", [chosen])


@pytest.mark.parametrize(
    ("attacks", "reason"),
    [
        ([own("energy", name="norm")], "attacks.0.custom.name: this name is taken"),
        ([own("energy", name="random")], "this name is taken"),
        ([own("energy", name="line\n")], "attacks.0.custom.name: expected a text of"),
        ([own("energy"), own("mean")], "each attack may be named once"),
        ([own("energy", modul="x:y")], "unknown setting; did you mean 'module'?"),
        ([own("energy", module="own attacks")], "attacks.0.custom.module: expected a text of"),
        ([own("energy", needs=["hints", "classes"])], "classes cannot be combined"),
        ([own("energy", num_hints=2)], "name hints in needs"),
        (["cosin"], "attacks.0: there is no such attack; did you mean 'cosine'?"),
        ([3], "attacks.0: expected the name of an attack, or a section with kind: custom"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(attacks: list[Any], reason: str) -> None:
    with pytest.raises(SettingsError) as refused:
        validate(AuditSettings, {"attacks": attacks}, "audit")
    assert reason in str(refused.value)


def test_the_monitor_looks_at_no_activations(tmp_path: Path) -> None:
    write_example(tmp_path)
    chosen = "{kind: custom, module: 'own_attacks:energy', name: mine"
    with pytest.raises(SettingsError, match="mine: the leak monitor looks at gradients alone"):
        build_parties(tmp_path, [f"leak_monitor={{attacks: [{chosen}, needs: [activations]}}]}}"])


def test_check_names_them(tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_example(tmp_path)
    good = "leak_monitor={attacks: [{kind: custom, module: 'own_attacks:energy', name: mine}]}"
    bad = good.replace("energy", "fails")
    for override, code, words in (
        (good, 0, "attacks: mine can score gradients"),
        (bad, 2, "fails on 8 rows"),
    ):
        sets = ["--set", override, "--set", f"listen=127.0.0.1:{port}"]
        ended = exit_code_of(active_program.main, "check", "-v", tmp_path / "active.yaml", *sets)
        output = capsys.readouterr()
        assert ended == code, output
        assert words in output.out + output.err
