"""Audit, ledger, plan and schema as a program uses them."""

import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import yaml

import splitveil
from splitveil import Ledger, attacks, audit, defenses, plan, settings_schema
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.privacy.observational_audit import epsilon_lower_bound
from splitveil.common.settings import validate
from tests.support.programs import ROOT
from tests.support.runs import ACTIVE, CONTRACT, write_example

ROWS = 600


def sent(noise: float, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return gradients of a logistic loss, labels, and the features on which they depend."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(ROWS, 3))
    probabilities = 1 / (1 + np.exp(-features[:, 0]))
    labels = (draw.random(ROWS) < probabilities).astype(int)
    weights = draw.normal(size=6)
    gradients = (probabilities - labels)[:, None] * weights
    return gradients + noise * draw.normal(size=gradients.shape), labels, features


def auc_by_hand(scores: Any, labels: Any) -> float:
    pairs = scores[labels == 1][:, None] - scores[labels == 0][None]
    area = float(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    return max(area, 1 - area)


def test_an_audit_measures_what_attacks_read() -> None:
    gradients, labels, _ = sent(noise=1.0)
    found = audit(gradients, labels)
    by_attack = {one.attack: one for one in found.batches}
    norm = auc_by_hand(np.linalg.norm(gradients, axis=1), labels)
    assert by_attack["norm"].leak_auc == pytest.approx(norm, abs=1e-12)
    assert by_attack["norm"].low < norm < by_attack["norm"].high
    assert by_attack["lda"].is_oracle
    assert not by_attack["norm"].is_oracle
    assert by_attack["norm"].needs == "nothing"


def test_batches_are_audited_one_by_one() -> None:
    gradients, labels, _ = sent(noise=1.0)
    found = audit(torch.tensor(gradients), torch.tensor(labels), batches=100, attacks=["norm"])
    (norm,) = found.batches
    ends = range(0, ROWS, 100)
    norms = np.linalg.norm(gradients, axis=1)
    aucs = [auc_by_hand(norms[i : i + 100], labels[i : i + 100]) for i in ends]
    assert norm.leak_auc == pytest.approx(np.mean(aucs), abs=1e-12)
    assert norm.batches == 6
    assert norm.q95 == pytest.approx(float(np.quantile(aucs, 0.95)))
    # The 97.5 % quantile of Student's t with five degrees of freedom.
    reach = 2.5705818 * np.std(aucs, ddof=1) / 6**0.5
    assert norm.high - norm.leak_auc == pytest.approx(reach, rel=1e-6)


def test_noise_without_labels_leaks_nothing_beyond_covariates() -> None:
    _, labels, features = sent(noise=1.0)
    noise = np.random.default_rng(5).normal(size=(ROWS, 6))
    found = audit(noise, labels, examples=np.arange(ROWS), covariates=features, attacks=["norm"])
    assert found.beyond is not None
    adjusted = found.beyond.adjusted["norm"]
    assert adjusted.low < 0.5 < adjusted.high
    assert (found.beyond.rows, found.to_json()["adjusted_rows"]) == (ROWS, ROWS)
    assert found.beyond.feature_auc == found.to_json()["feature_auc"] > 0.6  # what features reveal
    assert found.epsilon is None or found.epsilon.epsilon == 0


def test_an_epsilon_is_excluded_where_gradients_reveal_labels() -> None:
    """The features reveal a part of the labels, and the gradients the whole of them."""
    gradients, labels, features = sent(noise=0.01)
    given: dict[str, Any] = {
        "batches": 100,
        "examples": np.arange(ROWS),
        "attacks": ["accumulated_spectral"],
    }
    found = audit(gradients, labels, covariates=features, **given)
    assert found.epsilon is not None
    epsilon = found.epsilon
    expected = epsilon_lower_bound(epsilon.guesses, epsilon.correct, epsilon.pairs)
    assert epsilon.epsilon == expected > 1
    written = ["epsilon", "attack", "guesses", "correct", "pairs", "confidence", "delta"]
    assert list(found.to_json()["epsilon_lower_bound"]) == written
    without = audit(gradients, labels, **given)
    assert without.epsilon is None
    assert without.table("adjusted") == []


def test_several_epochs_add_up_over_examples() -> None:
    """Fresh noise hides labels in one epoch and averages out over twenty."""
    clean, labels, _ = sent(noise=0.0)
    draw = np.random.default_rng(3)
    epochs = [clean + 1.5 * draw.normal(size=clean.shape) for _ in range(20)]
    examples = np.tile(np.arange(ROWS), 20)
    found = audit(
        np.concatenate(epochs),
        np.tile(labels, 20),
        batches=np.arange(20 * ROWS) // 100,
        examples=[f"id {i}" for i in examples],
        attacks=["cosine", "accumulated_cosine"],
    )
    (batches,) = found.batches
    over_run = found.run["accumulated_cosine"]
    assert batches.leak_auc < over_run["low"] < over_run["auc"]
    assert found.strongest[0] == "accumulated_cosine"
    assert over_run["examples"] <= ROWS


def test_activations_and_own_functions_are_attacks_too() -> None:
    gradients, labels, features = sent(noise=1.0)
    found = audit(
        gradients,
        labels,
        activations=features,
        attacks=["activation_spectral"],
        custom={"first": lambda rows: rows[:, 0]},
    )
    by_attack = {one.attack: one.leak_auc for one in found.batches}
    assert by_attack["first"] == pytest.approx(auc_by_hand(gradients[:, 0], labels), abs=1e-12)
    assert "activation_spectral" in by_attack


def test_several_classes_are_audited_by_their_worst_pair() -> None:
    labels = np.arange(ROWS) % 3
    gradients = np.eye(3)[labels] + 0.1 * np.random.default_rng(0).normal(size=(ROWS, 3))
    found = audit(gradients, labels, batches=200, attacks=["cosine"])
    assert found.batches[0].leak_auc == pytest.approx(1.0)
    of_one = audit(np.zeros((4, 2)), [0, 0, 0, 0])
    assert (of_one.batches, of_one.skipped_one_class) == ((), 1)
    assert "no attack was measured" in repr(of_one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": [0, 1]}, "gradients: expected 2 rows"),
        ({"labels": [0, 0.5, 1]}, "expected labels"),
        ({"batches": 0}, "size of at least 1"),
        ({"batches": [1, 0, 0]}, "ascending"),
        ({"examples": [1, 1, 2]}, "at most once in a batch"),
        ({"activations": np.zeros((2, 2))}, "activations: expected 3 rows"),
        ({"gradients": np.full((3, 2), np.inf)}, "finite"),
        ({"gradients": [["a"], ["b"], ["c"]]}, "expected numbers"),
        ({"attacks": ["spectrl"]}, "'spectral'"),
        ({"attacks": ["accumulated_norm"]}, "no attack"),
        ({"attacks": ["accumulated_cosine"]}, "needs more than it was given"),
        ({"attacks": ["informed"]}, "needs more than it was given"),
    ],
)
def test_what_cannot_be_audited_is_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"gradients": np.zeros((3, 2)), "labels": [0, 1, 1], **arguments}
    with pytest.raises((ValueError, SettingsError), match=message):
        audit(given.pop("gradients"), given.pop("labels"), **given)


def test_a_ledger_adds_up_charges_by_example() -> None:
    ledger = Ledger(4)
    ledger.charge(0.25, [0, 1], adversary="anybody")
    ledger.charge(0.5, np.array([True, False, False, True]), adversary="honest-but-curious")
    assert ledger.guarantee([0]).sum_kl.max == 0.75
    assert ledger.guarantee([1]).guarantee.max == pytest.approx(leak_auc_bound(0.25))
    honest = ledger.guarantee([0]).against(defenses.Adversary.HONEST_BUT_CURIOUS).max
    assert honest == pytest.approx(leak_auc_bound(0.75))
    assert ledger.guarantee().guarantee.max == 1.0
    columns = np.array(ledger.frame()).tolist()
    assert [row[1] for row in columns] == [0.75, 0.25, 0.0, 0.5]
    assert [row[2] for row in columns][:3] == ["honest-but-curious", "anybody", "anybody"]


def test_what_would_exceed_a_limit_is_not_charged() -> None:
    ledger = Ledger(2)
    ledger.charge(0.2, [0], adversary="anybody")
    before = ledger.guarantee()
    assert not ledger.would_exceed(0.1, [0], adversary="anybody", sum_kl=0.3)
    assert ledger.would_exceed(0.11, [0], adversary="anybody", sum_kl=0.3)
    assert not ledger.would_exceed(0.11, [1], adversary="anybody", sum_kl=0.3)
    assert ledger.would_exceed(0.01, [0], adversary="honest-but-curious", leak_auc=0.9)
    narrower: dict[str, Any] = {"adversary": "honest-but-curious", "peers": "honest-but-curious"}
    assert not ledger.would_exceed(0.01, [0], leak_auc=0.9, **narrower)
    assert ledger.guarantee() == before
    for limit in ({}, {"leak_auc": 0.5}, {"leak_auc": 0.6, "sum_kl": 1}):
        with pytest.raises(ValueError, match="expected"):
            ledger.would_exceed(0.1, adversary="anybody", **limit)  # type: ignore[arg-type]


def test_a_charge_of_a_gaussian_mechanism_has_the_exact_figure() -> None:
    gaussian = Ledger(1)
    gaussian.charge(0.5, adversary="anybody", is_gaussian=True)
    expected = 0.5 * (1 + math.erf(math.sqrt(0.5) / 2))  # Phi(mu / sqrt 2)
    assert gaussian.guarantee().guarantee.max == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("examples", [3, ["ann", "bob", "eve"]])
def test_a_ledger_is_restored_from_its_state(examples: Any) -> None:
    ledger = Ledger(examples)
    ledger.charge(0.25, [1], adversary="anybody")
    again = Ledger(examples)
    again.load_state_dict(ledger.state_dict())
    again.charge(0.25, [1], adversary="anybody")
    assert again.guarantee().sum_kl.max == 0.5
    assert ledger.guarantee().sum_kl.max == 0.25
    other = Ledger(2 if isinstance(examples, int) else ["ann", "eve", "bob"])
    with pytest.raises(ValueError, match="expected"):
        other.load_state_dict(ledger.state_dict())


def test_a_run_continues_the_ledger_of_another_trainer(tmp_path: Path) -> None:
    ids = [f"person-{i:05d}" for i in range(400)]
    ledger = Ledger(ids)
    ledger.charge(0.25, ids[:100], adversary="anybody")
    ledger.save(tmp_path / "other")
    write_example(tmp_path)
    values = {**ACTIVE, "contract": CONTRACT, "earlier_ledgers": ["other/checkpoint"]}
    settings = validate(ActiveSettings, {**values, "base_dir": tmp_path}, "active")
    assert settings.earlier_answers().worst().sum_kl == 0.25
    again = Ledger.load(tmp_path / "other" / "checkpoint")
    assert again.guarantee([ids[0]]).sum_kl.max == 0.25
    assert again.guarantee([ids[100]]).sum_kl.max == 0.0
    with pytest.raises(ValueError, match="expected a ledger with ids"):
        Ledger(3).save(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0.1,), {}), "adversary: expected the peers"),
        (((0.1, [-1]), {"adversary": "anybody"}), "which has 3"),
        (((0.1, [1, 1]), {"adversary": "anybody"}), "each example once"),
        (((0.1, ["ann"]), {"adversary": "anybody"}), "knows no ids"),
        (((0.1, [1]), {"adversary": "everybody"}), "not a valid Adversary"),
        (((defenses.Charge(0.1), [1]), {"adversary": "anybody"}), "says both itself"),
    ],
)
def test_a_charge_that_says_too_little_is_refused(arguments: Any, message: str) -> None:
    words, named = arguments
    with pytest.raises(ValueError, match=message):
        Ledger(3).charge(*words, **named)


def test_a_plan_has_a_frame_and_prints_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan("breast_cancer", defense="noisy_label", settings={"contract.epochs": 7})
    rows = np.array(found.frame())
    assert rows.shape[0] == 2
    printed = str(found)
    assert "7" in printed
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(found) == printed  # in a notebook rich would display it instead
    monkeypatch.undo()
    assert found.to_json()["data"]["epochs"] == 7
    bounds = [one["bound_anybody"] for one in found.to_json()["answers"]]
    assert bounds == pytest.approx([0.638163, 0.638163], abs=1e-6)
    assert "<table>" in found._repr_html_()
    own = {
        "contract.epochs": 7,
        "active.defense": defenses.NoisyLabel(kind="gaussian", noise_ratio=2.0),
    }
    assert plan("breast_cancer", settings=own).to_json() == found.to_json()
    file = ROOT / "deploy" / "examples" / "breast_cancer" / "active.yaml"
    assert "defense marvell" in repr(plan(file))
    (answer, *_) = plan(file, defense="one_shot").to_json()["answers"]
    assert answer["bound_anybody"] == 0.5  # and not that of a run with gradients


def test_a_plan_reads_a_table_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"label": ["stays", "leaves"] * 50, "x": np.arange(100.0)}
    found = plan(
        active=table,
        positive_label="leaves",
        defense=defenses.Iso(noise_ratio=2.0),
        target_leak_auc=0.65,
    )
    data = found.to_json()["data"]
    assert (data["rows"], data["training_rows"]) == (100, 80)
    assert found.to_json()["target"]["leak_auc"] == 0.65
    with pytest.raises(SettingsError, match="reads those of the active party"):
        plan("breast_cancer", settings={"passive.model_seed": 1})
    here = tmp_path / r"a\1"  # no template
    here.mkdir()
    monkeypatch.chdir(here)
    text = {"active.data.features.sequences.note": {"tokenizer": "own.json", "max_length": 2}}
    table = {"label": [0, 1] * 50, "note": ["a", "b"] * 50}
    with pytest.raises(SplitveilError, match=f"^own.json: .* in {re.escape(str(here))}$"):
        plan(active=table, settings=text)
    Path("own.json").write_text("{}")
    with pytest.raises(
        SplitveilError, match=f"{re.escape(str(here / 'own.json'))}: .* Model missing"
    ):
        plan(active=table, settings=text)
    with pytest.raises(ValueError, match="not both"):
        plan()


EXAMPLE_FILES = sorted((ROOT / "deploy" / "examples").glob("*/*.yaml"))


@pytest.mark.parametrize("path", EXAMPLE_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_schemas_accept_every_example(path: Path) -> None:
    schema = settings_schema()[path.stem.partition("_")[0]]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("contract", {**CONTRACT, "epochs": 0}),
        ("contract", {**CONTRACT, "epoch": 1}),
        ("active", {**ACTIVE, "defense": {"name": "isotropic"}}),
        ("active", {**ACTIVE, "contract": 1}),
        ("active", {**ACTIVE, "base_dir": "/"}),
    ],
)
def test_the_schemas_refuse_what_the_settings_refuse(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, settings_schema(kind))


def test_all_names_are_there_and_no_others() -> None:
    with pytest.raises(ValueError, match="expected one of active, passive, contract"):
        settings_schema("other")  # type: ignore[arg-type]
    assert all(getattr(splitveil, name) is not None for name in splitveil.__all__)
    assert dir(splitveil) == sorted(splitveil.__all__)
    assert not hasattr(splitveil, "simulated")
    assert "noisy_label" in defenses.NAMES
    assert {"norm", "accumulated_cosine"} <= set(attacks.NAMES)
