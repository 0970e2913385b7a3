"""User-defined defenses are tried out, checked, charged what they state, and run like any other."""

import math
from pathlib import Path

import pytest
import torch

from splitveil.active_party.defenses import CustomDefense, Defended, Secrets, Step
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.common.errors import SettingsError
from tests.support.defenses import context_of, write_own_defenses
from tests.support.plans import printed_plan
from tests.support.runs import Parties, build_parties, run_in_process


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_own_defenses(tmp_path_factory.mktemp("own"))


@pytest.fixture(autouse=True)
def _on_the_module_path(
    module: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path_factory.getbasetemp() / "own0"))


def custom(module: str, name: str, **fields: object) -> CustomDefense:
    return CustomDefense.model_validate({"module": f"{module}:{name}", **fields})


def defended(module: str, name: str, rows: int = 6) -> Defended:
    defense = custom(module, name).build(context_of(3), Secrets())
    labels = torch.arange(rows) % 2
    return defense.defend(Step(torch.ones(rows, 3), labels))


def parties_of(example: Path, module: str, name: str, *more: str) -> Parties:
    defense = f"{{name: custom, module: '{module}:{name}'}}"
    return build_parties(example, [f"defense={defense}", *more])


# ---- what is tried out


@pytest.mark.parametrize(
    ("name", "fields", "complaint"),
    [
        ("NoSuchClass", {}, "has no class NoSuchClass"),
        ("NotADefense", {}, "is not a splitveil.active_party.defenses.Defense"),
        ("Clipped", {"arguments": {"noise_ratio": -1}}, "cannot be built: ValueError: noise_ratio"),
        ("Clipped", {"arguments": {"width": 1}}, "unexpected keyword argument 'width'"),
        ("Pair", {}, r"expected Defended\(gradient, charge\), got tuple"),
        ("Narrow", {}, r"shape \(8, 3\) on cpu, got torch.float32 of shape \(8, 1\)"),
        ("Infinite", {}, "holds NaN or infinity"),
        ("NeedsBothClasses", {}, "fails on a batch of 8 rows: ValueError: expected two classes"),
        ("Keyed", {}, "ValueError: no keys"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(
    module: str, name: str, fields: dict[str, object], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        custom(module, name, **fields).require_usable(context_of(3))


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(SettingsError, match="no_such_module cannot be imported"):
        custom("no_such_module", "Mine").require_usable(context_of())


@pytest.mark.parametrize("num_classes", [2, 4])
@pytest.mark.parametrize("name", ["Clipped", "Uncharged", "Counting"])
def test_what_fits_is_accepted(module: str, name: str, num_classes: int) -> None:
    custom(module, name).require_usable(context_of(num_classes=num_classes))
    custom(module, "Keyed", noise="persistent").require_usable(context_of())


def test_a_run_is_refused_when_it_is_built_and_not_at_its_first_answer(
    example: Path, module: str
) -> None:
    with pytest.raises(SettingsError, match="Infinite fails on a batch of 8 rows"):
        parties_of(example, module, "Infinite")


# ---- what it is charged


def test_every_answer_is_checked(module: str) -> None:
    defended(module, "FailsLater", rows=8)
    with pytest.raises(ValueError, match="expected a gradient like the raw one"):
        defended(module, "FailsLater", rows=9)


def test_targets_are_checked_and_given_the_labels_dtype(module: str) -> None:
    defense = custom(module, "Counting").build(context_of(3))
    rows = Step(labels=torch.tensor([0.0, 1.0, 1.0, 0.0]), rows=torch.arange(4))
    assert defense.targets(rows).tolist() == [0.0, 0.5, 0.5, 0.0]


def test_persistent_noise_needs_the_key_of_class_and_arguments(module: str, tmp_path: Path) -> None:
    first, second = (
        custom(module, "Keyed", noise="persistent", arguments=arguments)
        for arguments in ({}, {"noise_ratio": 3.0})
    )
    context, path = context_of(), tmp_path / "noise.key"
    assert first.open_noise_key(context, path) == first.open_noise_key(context, path)
    assert first.open_noise_key(context, path) != second.open_noise_key(context, path)
    assert custom(module, "Keyed").open_noise_key(context, path) is None
    with pytest.raises(ValueError, match="needs a noise key"):
        first.build(context)
    first.build(context, Secrets(key_from_insecure_seed(1)))


# ---- whole runs


def test_a_run_trains_with_it_and_the_ledger_adds_its_charges_up(
    example: Path, module: str
) -> None:
    parties = parties_of(example, module, "Clipped")
    run_in_process(parties)
    assert len(parties.active.evaluations) == 4
    assert parties.session.leak_bounds().sum_kl.max == pytest.approx(2 * 1.0)
    uncharged = parties_of(example, module, "Uncharged")
    run_in_process(uncharged)
    assert uncharged.session.leak_bounds().sum_kl.max == math.inf


def test_the_plan_says_that_the_class_answers_for_its_charges(example: Path, module: str) -> None:
    defense = f"defense={{name: custom, module: '{module}:Clipped'}}"
    budget = "run_budget={sum_kl: 4, adversary: knows class means only}"
    plan = printed_plan(example, defense, budget)
    assert "defense custom" in plan
    assert "not known before" in plan
    assert f"{module}:Clipped states its charges itself" in plan
    assert "it may end the run in any epoch" in plan
