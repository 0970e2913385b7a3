"""What columns say about the outcome, against tables whose shares are known."""

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from splitveil.active_party.defenses.example_keys import NoiseKey
from splitveil.active_party.defenses.noisy_label import (
    AlibiLabels,
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    RandomizedResponse,
    draw_noisy_labels,
)
from splitveil.common.data.features import FeatureEncoder, Features, NumericScaler, Vocabulary
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.models.ridge import statistics_of_labels, statistics_of_sums
from splitveil.common.models.settings import ScoreModel
from splitveil.passive_party.commands import run
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.feature_exposure import Sample
from splitveil.passive_party.information_value import (
    SMALL_LOSS,
    Binned,
    ColumnValue,
    column_value,
    information_values,
    losses,
    losses_of,
    shares_of_labels,
)
from splitveil.passive_party.report_page import read_exposure

ROWS, RELEASES = 20_000, 200
SHARES = {
    "strong": (0.1, 0.2, 0.3, 0.4),
    "medium": (0.15, 0.18, 0.22, 0.25),
    "unrelated": (0.2, 0.2, 0.2, 0.2),
}

Numbers = npt.NDArray[np.float64]


def value_of(rows: npt.ArrayLike, positives: npt.ArrayLike) -> float:
    """Return the information value by its definition, from the rows of each bin."""
    rows, positives = np.asarray(rows, float), np.asarray(positives, float)
    of_positives, of_negatives = positives / positives.sum(), rows - positives
    of_negatives = of_negatives / of_negatives.sum()
    return float((of_positives - of_negatives) @ np.log(of_positives / of_negatives))


def binned(shares: tuple[float, ...], rows: int = ROWS) -> tuple[Binned, Numbers]:
    """Return a column of equal bins, and each row's chance of being positive."""
    members = np.arange(rows) % len(shares)
    column = Binned("column", False, "abcd"[: len(shares)], members)
    return column, np.array(shares)[members]


@pytest.mark.parametrize("which", SHARES)
def test_intervals_of_noisy_labels_cover_the_known_value_and_estimates_are_not_the_plain_ones(
    which: str,
) -> None:
    """At .95, at least .90 of 200 releases cover it, three standard errors below."""
    column, chances = binned(SHARES[which])
    known, generator = value_of([1] * 4, SHARES[which]), np.random.default_rng(1)
    estimates, plain, covered = [], [], 0
    for _ in range(RELEASES):
        noisy = (generator.random(ROWS) < chances) + 1.5 * generator.normal(size=ROWS)
        shares, covariance = shares_of_labels(column.members, noisy)
        found = column_value(column, shares, covariance)
        assert found is not None
        covered += found.low <= known + 1e-9 <= found.high
        estimates.append(found.information_value)
        plain.append(value_of([1] * 4, shares))
    error = np.std(plain) / RELEASES**0.5
    assert covered >= 0.9 * RELEASES
    if which != "unrelated":  # whose estimates end at 0
        assert abs(np.mean(estimates) - known) < 3 * error
    if which != "strong":  # errors look like information
        assert np.mean(plain) - known > 4 * error
        assert np.mean(estimates) < np.mean(plain) - 2 * error


MECHANISMS: dict[str, LabelMechanism] = {
    "gaussian": GaussianLabels(kind="gaussian", noise_ratio=1.0),
    "laplace": LaplaceLabels(kind="laplace", epsilon=1.5),
    "randomized_response": RandomizedResponse(kind="randomized_response", epsilon=1.5),
    "alibi": AlibiLabels(kind="alibi", epsilon=3.0),
}


@pytest.mark.parametrize("which", MECHANISMS)
def test_shares_of_every_mechanism_are_right_within_their_errors(which: str) -> None:
    """Of randomized response, the unbiased inverse: (answer - p) / (1 - 2 p)."""
    mechanism, (column, chances) = MECHANISMS[which], binned(SHARES["strong"])
    labels = torch.from_numpy((np.random.default_rng(2).random(ROWS) < chances) * 1.0)
    ids = [str(number) for number in range(ROWS)]
    noisy = draw_noisy_labels(mechanism, labels, NoiseKey(bytes(32)), ids).double().numpy()
    if which == "randomized_response":
        flipped = 1 / (1 + math.exp(1.5))
        noisy = (noisy - flipped) / (1 - 2 * flipped)
    noisy = noisy[:, 1] if which == "alibi" else noisy
    shares, covariance = shares_of_labels(column.members, noisy)
    errors = np.sqrt(covariance.diagonal())
    assert (np.abs(shares - SHARES["strong"]) < 4 * errors).all()
    spread = [noisy[column.members == one].std() / (ROWS / 4) ** 0.5 for one in range(4)]
    assert errors == pytest.approx(spread, rel=0.1)


def test_the_error_of_a_weight_of_evidence_is_that_of_releases() -> None:
    column, chances = binned(SHARES["strong"])
    generator, found = np.random.default_rng(3), []
    for _ in range(100):
        noisy = (generator.random(ROWS) < chances) + 0.5 * generator.normal(size=ROWS)
        one = column_value(column, *shares_of_labels(column.members, noisy))
        assert one is not None
        found.append(
            [(each.weight_of_evidence, each.weight_of_evidence_error) for each in one.bins]
        )
    figures, errors = np.array(found).transpose(2, 0, 1)
    assert figures.std(axis=0) == pytest.approx(errors.mean(axis=0), rel=0.25)
    known = np.array(SHARES["strong"])
    expected = np.log(known / (1 - known)) - math.log(0.25 / 0.75)
    assert figures.mean(axis=0) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("positives", [0.0, 1.0])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_one_class_alone_has_no_figure(positives: float, noise: float) -> None:
    column, _ = binned(SHARES["strong"])
    noisy = positives + noise * np.random.default_rng(4).normal(size=ROWS)
    with np.errstate(all="raise"):
        assert column_value(column, *shares_of_labels(column.members, noisy)) is None


def test_bins_that_say_nothing_are_joined_and_every_figure_is_finite() -> None:
    """Bins of one row, of one class, and of shares beyond 0 and 1."""
    sizes = [1, 3000, 40, 5, 3000, 3000, 1]
    members = np.repeat(np.arange(len(sizes)), sizes)
    column = Binned("number", True, ["missing", *(f"from {one}" for one in range(6))], members)
    noisy = np.random.default_rng(5).normal(scale=0.3, size=len(members)) + (members > 3) * 0.5
    noisy += (np.arange(len(members)) % 4 == 0) * 0.4
    with np.errstate(all="raise"):
        found = column_value(column, *shares_of_labels(members, noisy))
    assert found is not None
    assert [one.name for one in found.bins] == ["missing, from 0", "from 1", "from 4"]
    assert [one.rows for one in found.bins] == [3001, 3045, 3001]
    figures = [found.information_value, found.low, found.high]
    figures += [one.weight_of_evidence_error for one in found.bins]
    assert np.isfinite(figures).all()
    assert found.low < found.information_value < found.high


# ---- noisy sums ----

BINS = 8


def summed(rows: int = 3000) -> tuple[ComponentsTrainer, FeatureEncoder, Features, Numbers]:
    """Return a trainer with a score's bits of three numbers and a category, and rows' chances.

    The second number goes with the first, and says nothing beyond it; the third says nothing.
    """
    generator = np.random.default_rng(6)
    x, job = generator.normal(size=(rows, 3)), generator.choice(3, rows, p=[0.6, 0.3, 0.1])
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    edges = np.quantile(x, np.linspace(0, 1, BINS + 1), axis=0).T
    places = [np.interp(one, at, np.arange(BINS + 1)) for one, at in zip(x.T, edges, strict=True)]
    encoder = FeatureEncoder(
        signed_log1p=False,
        numeric=tuple(NumericScaler(name=name, shift=0, scale=1) for name in ("a", "b", "none")),
        categorical=(Vocabulary(name="job", categories=("x", "y", "z")),),
        image=None,
        bins=tuple(map(tuple, edges.tolist())),
    )
    features = Features(np.stack(places, axis=1).astype(np.float32), 2 + job[:, None])
    model = ComponentsBottom(ScoreModel(kind="score"), encoder.shapes, (1,))
    moments = model.before_labels(lambda: [features])
    trainer = ComponentsTrainer(model, features, before_labels=(moments, encoder.names))
    chances = 1 / (1 + np.exp(1.5 - 0.8 * x[:, 0] - 0.8 * (job == 2)))
    return trainer, encoder, features, chances


def release_sums(trainer: ComponentsTrainer, bits: Any, labels: Any, seed: int) -> None:
    """Release sums as a label owner does at a noise ratio of 1."""
    deviation = bits.shape[1] ** 0.5
    noise = deviation * np.random.default_rng(seed).normal(size=bits.shape[1])
    sums = (bits.T @ labels + noise)[:, None]
    trainer.released = np.arange(len(labels)), sums, deviation


def test_intervals_of_noisy_sums_cover_the_known_values_and_order_the_columns() -> None:
    """Of 20 releases, at .95, at least 16 cover each: three standard errors below."""
    trainer, encoder, features, chances = summed()
    bits = np.column_stack([trainer.score.bits(features), np.ones(len(chances))]) * 1.0
    generator, covered, first = np.random.default_rng(7), Counter[str](), Counter[str]()
    lowest, within = list[float](), defaultdict[str, list[bool]](list)
    for seed in range(20):
        labels = (generator.random(len(chances)) < chances) * 1.0
        release_sums(trainer, bits, labels, seed)
        found = {one.name: one for one in information_values(trainer, encoder)}
        first[next(iter(found))] += 1
        lowest.append(found["none"].low)
        for name, column in found.items():
            members = _members_of(name, features, column)
            rows, positives = np.bincount(members), np.bincount(members, chances)
            covered[name] += column.low <= value_of(rows, positives) <= column.high
            held = np.array([(one.positives, one.positives_error) for one in column.bins]).T
            within[name] += (np.abs(held[0] - positives / rows) <= 1.96 * held[1]).tolist()
    assert first == {"a": 20}
    assert min(covered.values()) >= 16
    generator = np.random.default_rng(3)  # by which b has the highest upper end
    labels = (generator.random(len(chances)) < chances) * 1.0
    noisy = (labels + generator.normal(size=len(labels)))[:, None]
    trainer.released = np.arange(len(labels)), noisy, 0.0  # of the same charge
    of_labels = {one.name: one for one in information_values(trainer, encoder)}
    lows = [one.low for one in of_labels.values()]
    assert lows == sorted(lows, reverse=True)  # an estimate that is only noisy comes last
    widths = [one["a"].high - one["a"].low for one in (of_labels, found)]
    assert widths[0] > 1.3 * widths[1]
    assert max(lowest) < 0.02
    assert len(covered) == 4
    assert min(map(np.mean, within.values())) >= 0.92  # known shares, near each bin's


def _members_of(name: str, features: Features, column: ColumnValue) -> npt.NDArray[np.int64]:
    """Return each row's bin as it is shown: rows in the order of bins, by their counts."""
    assert features.numeric is not None
    assert features.categorical is not None
    if name == "job":
        of_jobs: npt.NDArray[np.int64] = features.categorical[:, 0] - 2
        return np.minimum(of_jobs, len(column.bins) - 1)
    order = np.argsort(features.numeric[:, ("a", "b", "none").index(name)])
    members = np.empty(len(order), np.int64)
    members[order] = np.repeat(np.arange(len(column.bins)), [one.rows for one in column.bins])
    return members


def test_a_release_of_several_classes_has_no_figures() -> None:
    trainer, encoder, *_ = summed(200)
    trainer.released = np.arange(200), np.ones((200, 3)), 0.0
    assert information_values(trainer, encoder) == ()


@pytest.mark.parametrize(
    "labels", [np.full(400, 0.5), np.full(400, -1e38), 0.5 + np.arange(400) % 7 * 1e-9]
)
def test_labels_that_a_peer_makes_up_raise_nothing(labels: npt.NDArray[np.float64]) -> None:
    """Where bins are equal but for rounding, an information value is near 1e-33."""
    members = np.arange(400) % 7
    column = Binned("a", True, list("abcdefg"), members)
    found = column_value(
        column, *shares_of_labels(members, labels.astype(np.float32).astype(float))
    )
    for value in () if found is None else (found.information_value, found.low, found.high):
        assert math.isfinite(value)


def test_what_columns_give_away_is_written_whatever_was_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError

    monkeypatch.setattr(run, "information_values", fail)
    trainer, encoder, *_ = summed(400)
    run.try_to_measure(tmp_path, trainer, encoder, 400, Sample.draw(np.arange(400)))
    assert read_exposure(tmp_path) is not None
    assert caplog.messages == ["information values of the columns could not be measured"]


# ---- without a column ----


def explained(codes: npt.NDArray[Any], chances: npt.NDArray[Any]) -> float:
    """Return the variance that a linear model of the codes explains."""
    design = np.column_stack([np.ones(len(codes)), codes])
    return float((design @ np.linalg.lstsq(design, chances, rcond=None)[0]).var())


@pytest.mark.parametrize(
    ("release", "ratio", "unseen"),
    [("labels", 1.0, 0), ("labels", 2.8, 0), ("sums", 2.8, 0), ("sums", 2.8, 3), ("sums", 2.8, 5)],
)
def test_intervals_of_what_is_lost_cover_a_strong_a_twin_and_an_unrelated_column(
    release: str, ratio: float, unseen: int
) -> None:
    """At .95, at least .90 of 200 releases cover it, three standard errors below.

    A twin says what its copy says: without either, nothing is lost, without both a lot. Of the
    strong column's five codes, some are in no sum.
    """
    generator = np.random.default_rng(8)
    x = generator.normal(size=(ROWS, 3))
    places = np.column_stack([x, x[:, 1]])[:, :, None] - np.linspace(-1.5, 1.5, 5)
    codes, each = (places > 0).reshape(ROWS, -1) * 1.0, ("strong", "twin", "unrelated", "copy")
    names = np.repeat(np.array(each, dtype=object), 5)
    strength = codes[:, :5].sum(1) - 2.5 + 0.7 * (codes[:, 5:10].sum(1) - 2.5)
    chances = 1 / (1 + np.exp(1 - 0.7 * strength))
    total = explained(codes, chances)
    known = {name: 1 - explained(codes[:, names != name], chances) / total for name in each}
    assert known["strong"] > 0.5
    assert max(abs(known[one]) for one in ("twin", "copy", "unrelated")) < 0.001
    every = np.column_stack([np.ones(ROWS), codes, codes[:, unseen:]])  # bits are codes
    products, counted = every.T @ every, every[:, [*range(1 + unseen, 21), 0]]
    num_sums, covered, strong = 21 - unseen, Counter[str](), list[tuple[float, float]]()
    deviation = ratio * num_sums**0.5
    for _ in range(RELEASES):
        labels = (generator.random(ROWS) < chances) * 1.0
        if release == "sums":
            sums = counted.T @ labels + deviation * generator.normal(size=num_sums)
            statistics = statistics_of_sums(products, 20, sums[:, None], deviation)
        else:
            noisy = labels + ratio * generator.normal(size=ROWS)
            own, square = every[:, :21].T @ noisy, noisy @ noisy
            joined = np.block([[products[:21, :21], own[:, None]], [own, square]])
            statistics = statistics_of_labels(joined, 20)
        found = losses_of(statistics, names)
        for one in found:
            assert 0 <= one.low <= one.high <= 1
            covered[one.name] += one.low - 0.001 <= known[one.name] <= one.high + 0.001
            strong += [(one.loss, one.low)] if one.name == "strong" else []
            assert one.name != "strong" or one.high > SMALL_LOSS
        covered["found"] += len(found) == 4
        covered["small"] += ("unrelated", True) in [(x.name, x.high <= SMALL_LOSS) for x in found]
    assert covered["found"] >= 0.95 * RELEASES
    assert min(covered[name] for name in each) >= 0.9 * covered["found"]
    if not unseen:
        loss, low = np.transpose(strong)
        assert loss.mean() == pytest.approx(known["strong"], abs=0.03)
        assert np.median(low) > 0
    least = 0.8 if unseen == 5 else 0.9
    assert covered["small"] > least * RELEASES or release == "labels"
    assert covered["small"] == 0 or ratio == 1 or release == "sums"


def test_what_is_lost_follows_from_either_release_of_a_run() -> None:
    """Of columns a, b that goes with a and adds nothing, an unrelated one, and a job."""
    trainer, encoder, features, chances = summed(20_000)
    bits = np.column_stack([trainer.score.bits(features), np.ones(len(chances))]) * 1.0
    generator = np.random.default_rng(9)
    labels = (generator.random(len(chances)) < chances) * 1.0
    release_sums(trainer, bits, labels, 10)
    for _ in range(2):
        found = losses(trainer, encoder)
        assert [one.name for one in found][:2] == ["a", "job"]
        assert found[0].low > 0.15 > found[1].low > 0.01 > found[2].low
        assert {one.name for one in found if one.high <= SMALL_LOSS} >= {"b"}
        noisy = (labels + 0.5 * generator.normal(size=len(labels)))[:, None]
        trainer.released = np.arange(len(labels)), noisy, 0.0
    trainer.released = np.arange(len(labels)), generator.random((len(labels), 1)), 0.0
    assert losses(trainer, encoder) == ()  # labels that no column explains
    trainer.released = np.arange(len(labels)), generator.random((len(labels), 3)), 0.0
    assert losses(trainer, encoder) == ()
