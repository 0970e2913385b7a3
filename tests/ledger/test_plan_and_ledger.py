"""The plan's promises before a run, compared with the ledger's charges afterwards.

The runs are small, and memorise their examples: spreads of the classes come apart late in
training, and small batches lack a class, which is what drives charges up.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from splitveil.common.privacy.charge import Adversary
from tests.support.plans import printed_plan
from tests.support.runs import build_parties, run_in_process, write_example
from tests.support.tables import write_classes

SEED = "insecure_noise_seed: 1"
MEMORISED = [
    "contract.epochs=4",
    "contract.batch_size=8",
    "optimizer.learning_rate=0.05",
    "top_model={kind: mlp, hidden: [32]}",
]
FLIPS = "mechanism: {kind: randomized_response, epsilon: 2}"
LABELS = f"name: noisy_label, {FLIPS}"
TWO = [
    "name: iso, noise_ratio: 4",
    "name: iso, noise_ratio: 4, noise: persistent",
    "name: max_norm",
    "name: marvell, strength: {power_ratio: 4}",
    "name: marvell, strength: {sum_kl: 0.25}",
    "name: marvell, strength: {leak_auc: 0.6}, statistics: running",
    "name: marvell, noise: persistent, strength: {power_ratio: 3}",
    f"name: noisy_label, top_labels: noisy, {FLIPS}",
    "name: gafm, composed_with: {name: iso, noise_ratio: 4}",
    f"name: gafm, composed_with: {{name: noisy_label, top_labels: noisy, {FLIPS}}}",
]
FOUR = [
    "name: iso, noise_ratio: 4",
    "name: marvell, strength: {power_ratio: 3}",
    "name: marvell, strength: {sum_kl: 0.3}",
    "name: marvell, strength: {detection_error: 0.4}",
    "name: marvell, strength: {power_ratio: 3}, statistics: running",
    f"name: noisy_label, top_labels: noisy, {FLIPS}",
]

PROMISED = {
    *(one for one in TWO if "noise: persistent" in one or "noisy_label" in one),
    *(one for one in FOUR if "marvell" in one and "running" not in one),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    write_example(folder, rows=160)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    write_classes(folder, rows=160)
    return folder


def promises(plan: str) -> tuple[float, float]:
    """Return what the plan promises for any run: sum_kl, the bound for the weakest peers.

    The second row of the configured noise is of the whole run. Infinite where it promises nothing.
    """
    lines = plan.splitlines()
    at = next(number for number, line in enumerate(lines) if "(configured)" in line)
    cells = [cell.strip() for cell in lines[at + 1].strip("│ ").split("│")]
    if "answers" in cells or len(cells) < 4:
        raise AssertionError(plan)
    sum_kl, _, *_, bound = cells[-5:]
    if "likely" in sum_kl or ".." in sum_kl or "not known" in sum_kl:
        return math.inf, math.inf
    return float(sum_kl.removeprefix("at most ")), float(bound.removeprefix("at most "))


def charged(folder: Path, overrides: Sequence[str]) -> tuple[float, float]:
    contract = [one for one in overrides if one.startswith("contract.")]
    parties = build_parties(folder, overrides, contract)
    run_in_process(parties)
    bounds = parties.session.leak_bounds()
    return bounds.sum_kl.max, bounds.against(Adversary.CLASS_MEANS).max


@pytest.mark.parametrize(
    ("classes", "defense"),
    [("two", one) for one in TWO if one in PROMISED]
    + [("four", one) for one in FOUR if one in PROMISED],
)
def test_no_run_is_charged_more_than_the_plan_promises(
    request: pytest.FixtureRequest, classes: str, defense: str
) -> None:
    folder: Path = request.getfixturevalue(classes)
    overrides = [*MEMORISED, f"defense={{{defense}, {SEED}}}"]
    promised, found = promises(printed_plan(folder, *overrides)), charged(folder, overrides)
    assert found[0] <= promised[0] * (1 + 1e-9) < math.inf
    assert found[1] <= promised[1] * (1 + 1e-9)


def test_what_is_exact_or_a_bound_is_promised_and_nothing_else(two: Path, four: Path) -> None:
    for folder, defenses in ((two, TWO), (four, FOUR)):
        for defense in defenses:
            plan = printed_plan(folder, *[*MEMORISED, f"defense={{{defense}, {SEED}}}"])
            assert (promises(plan)[0] < math.inf) == (defense in PROMISED), plan


def test_an_estimate_says_that_a_run_may_be_charged_more_and_one_is(two: Path) -> None:
    """Batches of one row: the first of them lacks a class, and has no bound at all."""
    overrides = [
        "contract.batch_size=1",
        "contract.epochs=1",
        f"defense={{name: iso, noise_ratio: 4, {SEED}}}",
    ]
    plan = printed_plan(two, *overrides)
    assert "likely 0 .. 1 " in plan
    assert "at most" not in plan
    assert "An estimate, and no bound." in plan
    assert "may be charged more, up to infinity" in plan
    assert charged(two, overrides)[0] == math.inf


@pytest.mark.parametrize(
    ("defense", "budget", "said"),
    [
        (TWO[0], 100, "all 4 epochs fit, if charges are as estimated"),
        (TWO[1], 1, "all 4 epochs fit ("),
        (TWO[3], 1, "higher charges end it sooner"),
        (TWO[6], 0.1, "the run ends in epoch 1 "),
        (TWO[2], 1, "it may end the run in any epoch"),
    ],
)
def test_a_budget_is_promised_to_suffice_only_where_charges_are_known(
    two: Path, defense: str, budget: float, said: str
) -> None:
    limit = f"run_budget={{sum_kl: {budget}, adversary: knows class means only}}"
    overrides = [*MEMORISED, f"defense={{{defense}}}", limit]
    assert said in printed_plan(two, *overrides).replace("epochs fit\n", "epochs fit (\n")


@pytest.mark.parametrize(
    ("defense", "said"),
    [
        ("name: marvell", "do not describe a peer that looks across the gap"),
        (f"{LABELS}, top_labels: true", "does not describe one that chooses activations"),
        (LABELS, ""),  # all are bounded
        ("name: none", ""),  # nobody is
    ],
)
def test_a_bound_that_does_not_hold_for_every_peer_says_so(
    two: Path, defense: str, said: str
) -> None:
    plan = printed_plan(two, f"defense={{{defense}}}")
    assert said in plan
    assert ("not describe" in plan) is bool(said)
