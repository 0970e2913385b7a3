"""The promises of `docs/defenses.md` about each defense, tested against every attack.

Whole runs on `breast_cancer`, most of them with the labels permuted at random: then features
reveal nothing about a label, every attack works without a defense, and its figure under a defense
is only the gradients' leak. With the true labels, attacks that know some examples' labels find
in gradients what the party's features reveal as well; one test shows how much that is.

A claim about single answers is held against the mean leak AUC over the batches of a run, one about
the run against its leak AUC less three standard errors. Every claim comes with a defense of which
it would be false, and an attack that shows it: attacks that never find too much would prove
nothing. Rows, weights and noise are seeded.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm as normal
from torch import nn

from splitveil import SettingsError, simulate
from splitveil.common.privacy.attacks import ATTACKS, FINAL_ATTACKS, RUN_ATTACKS
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import RunFigures
from tests.support.attacked_run import BATCH_ATTACKS, AttackedRun, attacked_run, deal_labels
from tests.system.conftest import needs_data

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
EXAMPLE = EXAMPLES / "breast_cancer"
SAME_NOISE = "insecure_noise_seed: 7"
ON_GRADIENTS = tuple(name for name in BATCH_ATTACKS if ATTACKS[name].reads_gradients)
GATHERED = tuple(name for name in RUN_ATTACKS if name not in FINAL_ATTACKS)
BEYOND_MEANS: frozenset[str] = frozenset(
    {"residual_energy", "informed", "accumulated_residual_energy", "accumulated_informed"}
)
"""Attacks that look beyond the class means of a batch, which is all that fresh noise covers."""
ON_MEANS = tuple(name for name in ON_GRADIENTS if name not in BEYOND_MEANS)
ENERGIES = frozenset({"residual_energy", "accumulated_residual_energy"})
READ_DIRECTIONS = frozenset(
    {
        "cosine",
        "cosine_majority",
        "spectral",
        "kmeans",
        "accumulated_cosine",
        "accumulated_spectral",
        "accumulated_kmeans",
    }
)

NONE = "name: none"
WEAK_MARVELL = "name: marvell, strength: {power_ratio: 0.25}"
FRESH_MARVELL = "name: marvell, strength: {power_ratio: 4}"
PERSISTENT_MARVELL = "name: marvell, noise: persistent, strength: {power_ratio: 4}"
GAUSSIAN_LABELS = "name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}"


def of_detection_error(error: float) -> float:
    """Return the largest AUC where no detector errs less: its total variation is 1 - 2 error."""
    variation = 1 - 2 * error
    return 0.5 + variation - variation**2 / 2


def of_sum_kl(sum_kl: float) -> float:
    """Return the bound, 1/2 + V - V^2/2 with 2 V ln((1 + V)/(1 - V)) = K."""
    variation = brentq(lambda v: 2 * v * math.log((1 + v) / (1 - v)) - sum_kl, 0, 1 - 1e-12)
    return float(0.5 + variation - variation**2 / 2)


def of_one_number(noise_ratio: float) -> float:
    """Return the best AUC on y + k x, x normal: Phi(1/(k sqrt 2))."""
    return float(normal.cdf(1 / (noise_ratio * math.sqrt(2))))


def of_label_privacy(epsilon: float) -> float:
    """Return the largest AUC under epsilon-label-differential privacy."""
    return 1 / (1 + math.exp(-epsilon))


class Claim(NamedTuple):
    defense: str
    bound: float
    """No attack's leak AUC is higher."""

    wrong: str
    """A defense of which this would be false."""

    attacks: tuple[str, ...] = ON_MEANS


OVER_RUN = tuple(attack for attack in RUN_ATTACKS if attack != "completion_400")
"""These tables are too small for 400 labels."""

REPEATED = (*ON_GRADIENTS, *OVER_RUN)

CLAIMS = {
    "marvell leak_auc": Claim("name: marvell, strength: {leak_auc: 0.6}", 0.6, WEAK_MARVELL),
    "marvell detection_error": Claim(
        "name: marvell, strength: {detection_error: 0.4}", of_detection_error(0.4), WEAK_MARVELL
    ),
    "marvell sum_kl": Claim(
        "name: marvell, strength: {sum_kl: 0.25}", of_sum_kl(0.25), WEAK_MARVELL
    ),
    "marvell power_ratio": Claim(FRESH_MARVELL, of_sum_kl(1 / 4), WEAK_MARVELL),
    "marvell persistent": Claim(PERSISTENT_MARVELL, of_one_number(2), FRESH_MARVELL, REPEATED),
    "iso persistent": Claim(
        "name: iso, noise: persistent, noise_ratio: 8",  # in 16 dimensions: 2 along one
        of_one_number(2),
        "name: iso, noise_ratio: 8",
        REPEATED,
    ),
    "max_norm": Claim(
        "name: max_norm",
        0.55,  # "well": it equalises the norms' squares on average, not their distributions
        "name: iso, noise_ratio: 0.5",
        ("norm",),
    ),
    "noisy_label gaussian": Claim(
        GAUSSIAN_LABELS,
        of_one_number(2),
        "name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 0.5}",
        REPEATED,
    ),
    "noisy_label laplace": Claim(
        "name: noisy_label, mechanism: {kind: laplace, epsilon: 1}",
        of_label_privacy(1),
        "name: noisy_label, mechanism: {kind: laplace, epsilon: 4}",
        REPEATED,
    ),
    "noisy_label randomized_response": Claim(
        "name: noisy_label, mechanism: {kind: randomized_response, epsilon: 1}",
        of_label_privacy(1),
        "name: noisy_label, mechanism: {kind: randomized_response, epsilon: 4}",
        REPEATED,
    ),
}


class Runs:
    """Trains under each defense once.

    Two batches of more than 200 rows in each epoch: their AUCs stray little, and no rest of a few
    rows has one of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._dealt_labels = deal_labels(EXAMPLE, folder, seed=5)
        self._done: dict[tuple[str, bool], AttackedRun] = {}

    def __call__(self, defense: str, *, dealt: bool = True) -> AttackedRun:
        """Return the run, with labels dealt out at random or the true ones."""
        key = defense, dealt
        if key not in self._done:
            active, passive = overrides(defense)
            active += self._dealt_labels if dealt else []
            self._done[key] = attacked_run(EXAMPLE, active, passive)
        return self._done[key]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("claims"))


def overrides(defense: str) -> tuple[list[str], list[str]]:
    both = ["contract.epochs=12", "contract.batch_size=240", "optimizer.learning_rate=0.01"]
    seeded = defense if defense == NONE else f"{defense}, {SAME_NOISE}"
    active = [*both, "insecure_nonce_seed=1", f"defense={{{seeded}}}"]
    return active, [*both, "insecure_nonce_seed=2"]


def leaks(found: AttackedRun, layers: Sequence[str] = ("cut", "first")) -> dict[str, float]:
    """Return each attack's leak AUC at its best layer; over the run, the least that it may be."""
    of_batches: dict[str, float] = {
        attack: max(
            found.leak[layer][attack].mean for layer in layers if attack in found.leak[layer]
        )
        for attack in ON_GRADIENTS
    }
    of_run: dict[str, float] = {
        attack: max(
            surely(found.run_level[layer][attack])
            for layer in layers
            if attack in found.run_level[layer]
        )
        for attack in OVER_RUN
    }
    return of_batches | of_run


def surely(found: RunFigures) -> float:
    """Return the leak AUC less three standard errors, which are half its 95 % interval each."""
    return found.auc - 1.5 * (found.auc - found.low)


def by_chance(claim: Claim, found: AttackedRun) -> float:
    """Return what the mean leak AUC of batches may be above that of infinitely large ones.

    Scores that know nothing have a mean leak of E|AUC - 1/2| above 1/2. Scores that know something
    stray no more, but for those that halves of a batch lend each other the classes for: their AUC
    strays the root of two further. Where noise is repeated, all batches are of one draw of it, and
    their mean may be three standard errors of a single AUC of all examples above.
    """
    turned = statistics.mean(value for _, value in found.random) - 0.5
    whole = found.run_level["cut"]["accumulated_cosine"]
    error = (whole.auc - whole.low) / 2
    return math.sqrt(2) * turned + (3 * error if claim.attacks == REPEATED else 0.0)


def beyond(claim: Claim, found: AttackedRun, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the claim's attacks that found more than it allows, and what they found."""
    margin = by_chance(claim, found)
    return {
        attack: value
        for attack, value in measured.items()
        if attack in claim.attacks
        and value > claim.bound + (0.0 if attack in RUN_ATTACKS else margin)
    }


def only(measured: Mapping[str, float], attacks: Collection[str]) -> dict[str, float]:
    return {attack: value for attack, value in measured.items() if attack in attacks}


@pytest.mark.parametrize("attack", [*ON_GRADIENTS, *GATHERED])
def test_the_attack_reads_the_labels_where_nothing_is_defended(run: Runs, attack: str) -> None:
    """The norm reveals less: more than a third are positive, and both classes' residuals are long.

    Energy across the gap needs noise across the gap, which fresh marvell adds.
    """
    height = 0.8 if attack == "norm" else 0.95
    found = run(FRESH_MARVELL if attack in ENERGIES else NONE)
    assert leaks(found)[attack] >= (0.75 if attack == "residual_energy" else height)


ORACLES: tuple[str, ...] = ("cosine", "mean", "hint_inner_product_1")
BLIND: tuple[str, ...] = ("cosine_majority", "spectral")


@pytest.mark.parametrize(
    ("example", "both", "all_of", "one_of"),
    [
        ("breast_cancer", [], (*ORACLES, "median", "hint_inner_product_5", *BLIND), ()),
        pytest.param("default_credit", ["contract.epochs=2"], ORACLES, BLIND, marks=needs_data),
    ],
)
def test_on_an_example_as_shipped_nothing_is_hidden_without_a_defense(
    example: str, both: list[str], all_of: tuple[str, ...], one_of: tuple[str, ...]
) -> None:
    bare = [*both, "defense={name: none}", "insecure_nonce_seed=1"]
    own = [*both, "insecure_nonce_seed=2"]
    found = attacked_run(EXAMPLES / example, bare, own, [*all_of, *one_of])
    measured = {attack: figures.mean for attack, figures in found.leak["cut"].items()}
    assert {attack: measured[attack] for attack in all_of if measured[attack] < 0.95} == {}
    assert not one_of or max(measured[attack] for attack in one_of) >= 0.95


@pytest.mark.parametrize("name", CLAIMS)
def test_no_attack_finds_more_than_the_defense_claims(run: Runs, name: str) -> None:
    claim = CLAIMS[name]
    found = run(claim.defense)
    assert beyond(claim, found, leaks(found)) == {}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_claim_would_be_found_false_of_another_defense(run: Runs, name: str) -> None:
    claim = CLAIMS[name]
    found = run(claim.wrong)
    assert beyond(claim, found, leaks(found)) != {}


@pytest.mark.parametrize(
    "name", ["marvell leak_auc", "marvell persistent", "iso persistent", "noisy_label gaussian"]
)
def test_the_claim_holds_at_the_cut_with_true_labels(run: Runs, name: str) -> None:
    """Against attacks on directions: those see little of what features reveal, and lengths do."""
    claim = CLAIMS[name]
    found = run(claim.defense, dealt=False)
    assert beyond(claim, found, only(leaks(found, ["cut"]), READ_DIRECTIONS)) == {}


def test_max_norm_hides_the_direction_less_well_than_the_norm(run: Runs) -> None:
    found = leaks(run("name: max_norm"))
    assert found["norm"] < 0.6
    assert found["spectral"] > 0.8
    assert found["accumulated_spectral"] > 0.95


def test_an_answer_s_charge_bounds_every_attack_on_it(run: Runs) -> None:
    """The bound that the ledger has of one answer; against less noise it would not hold.

    The bound itself depends on the noise that was drawn: its mean over the batches strays by
    about .01 from one draw, or one machine's rounding, to the next. Less noise is caught as long as
    the bound and the margin stay below 1 together, from which they are .2 away here.
    """
    found, weaker = run("name: iso, noise_ratio: 8"), run("name: iso, noise_ratio: 0.5")
    bound = statistics.mean(found.answer_bounds)
    claim = Claim("", bound, "", ON_GRADIENTS)
    assert beyond(claim, found, leaks(found)) == {}
    assert beyond(claim, weaker, leaks(weaker)) != {}


def test_the_ledger_s_bound_holds_for_what_gathers_over_fresh_answers(run: Runs) -> None:
    found, weaker = run("name: marvell, strength: {leak_auc: 0.6}"), run(FRESH_MARVELL)
    claim = Claim(
        "",
        found.bounds.against(Adversary.CLASS_MEANS).max,
        "",
        tuple(name for name in RUN_ATTACKS if name not in BEYOND_MEANS),
    )
    assert 0.6 < claim.bound < 0.85
    assert beyond(claim, found, leaks(found)) == {}
    assert beyond(claim, weaker, leaks(weaker)) != {}


def test_what_combines_hints_with_gradients_finds_what_the_features_reveal_anyway(
    run: Runs,
) -> None:
    """Above the bound with true labels, and not without what the features know of them."""
    attack, bound = "hint_combiner_200", of_one_number(2)
    true = run(GAUSSIAN_LABELS, dealt=False)
    assert leaks(true)[attack] > bound
    assert true.features_alone["hint_combiner_200"] > true.run_level["first"][attack].auc
    assert leaks(run(GAUSSIAN_LABELS))[attack] < bound


def test_what_looks_beyond_class_means_passes_the_bound_of_fresh_noise(run: Runs) -> None:
    """And not that of persistent noise, which covers what an honest peer knows."""
    fresh, persistent = run(FRESH_MARVELL), run(PERSISTENT_MARVELL)
    bound = fresh.bounds.against(Adversary.CLASS_MEANS).max
    for attack in ("accumulated_residual_energy", "accumulated_informed"):
        assert leaks(fresh)[attack] > bound
        assert leaks(persistent)[attack] <= of_one_number(2)
    assert fresh.bounds.against(Adversary.HONEST_BUT_CURIOUS).max == 1.0


def test_persistent_noise_holds_against_a_peer_who_knows_the_predictions() -> None:
    """And the estimate for fresh noise does not, once the model is nearly certain."""
    found: dict[str, float] = {}
    estimates: dict[str, float] = {}
    for defense in (PERSISTENT_MARVELL, FRESH_MARVELL):
        course = attacked_run(EXAMPLE, *overrides(defense), ["accumulated_informed"])
        found[defense] = surely(course.run_level["cut"]["accumulated_informed"])
        estimates[defense] = course.bounds.estimate.max
    assert estimates[PERSISTENT_MARVELL] == pytest.approx(of_one_number(2))
    assert found[PERSISTENT_MARVELL] <= estimates[PERSISTENT_MARVELL]
    assert found[FRESH_MARVELL] > estimates[FRESH_MARVELL]


NOISE = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(400) % 2
FIXED = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU())
FIXED.get_parameter("0.weight").data.normal_(generator=torch.Generator().manual_seed(1))


class LearnedBefore(nn.Linear):
    """A top model with weights that were fitted to the true labels of the same rows."""

    def __init__(self) -> None:
        super().__init__(64, 1)
        rows = FIXED((NOISE - NOISE.mean(0)) / NOISE.std(0)).detach()
        rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
        fitted = torch.linalg.lstsq(rows, (1.0 - 2.0 * LABELS)[:, None]).solution[:, 0]
        self.weight.data.copy_(20 * fitted[:-1])
        self.bias.data.fill_(20 * float(fitted[-1]))


def test_a_top_model_that_learned_from_true_labels_would_pass_the_bound_and_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The features are noise: what attacks find is what gradients reveal.

    Predictions that are the other label move residuals by 2 between labels, and not by 1.
    """
    chosen = {
        "contract.epochs": 3,
        "contract.cut_shape": [64],
        "active.top_model": LearnedBefore,
        "passive.bottom_model": FIXED,
        "passive.optimizer.learning_rate": 1e-9,
        "passive.adversary": None,
        "active.leak_monitor.attacks": ["accumulated_spectral"],
    }
    tables: dict[str, Any] = {"active": {"label": LABELS.numpy()}, "passive": NOISE.numpy()}
    noisy = {"name": "noisy_label", "mechanism": {"kind": "gaussian", "noise_ratio": 1}}
    defended = partial(simulate, **tables, defense=noisy, settings=chosen, threads=1)
    with pytest.raises(SettingsError, match="top_model: LearnedBefore brings values of weight"):
        defended()
    monkeypatch.setattr("splitveil.common.models.factory._check_drawn", lambda *_: None)
    (run,) = defended()
    (low,) = (row["low"] for row in run.rows("attacks") if row["over"] == "run")
    assert isinstance(low, float)
    assert low > run.bounds["anybody"] == pytest.approx(0.76025, abs=1e-5)
