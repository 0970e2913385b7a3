"""Noise that belongs to an example: what an adversary who remembers makes of it, and of others."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from splitveil.active_party import defenses
from splitveil.active_party.defenses import Adversary, DefenseSettings, Step, persistent
from splitveil.active_party.defenses.example_keys import (
    GRADIENT_NOISE,
    LABEL_NOISE,
    NoiseKey,
    example_keys,
    key_from_insecure_seed,
    key_name,
    scalars,
)
from splitveil.active_party.defenses.marvell import PowerRatio, SumKl
from splitveil.active_party.defenses.persistent import moves_of, noisy_rows
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.common.privacy.leakage import leak_auc
from tests.support.defenses import build_defense, context_of

KEY = key_from_insecure_seed(1)
IDS = [f"person-{number:05d}" for number in range(4000)]
CUT_DIM = 8

PERSISTENT: list[DefenseSettings] = [
    defenses.IsoDefense(noise="persistent"),
    defenses.MaxNormDefense(noise="persistent"),
    defenses.MaxNormPositiveDefense(noise="persistent"),
    defenses.MarvellDefense(noise="persistent"),
]
BOUNDED = [PERSISTENT[0], PERSISTENT[3]]


def named(settings: DefenseSettings) -> str:
    return settings.name


def keys_of(ids: list[str], key: NoiseKey = KEY) -> Tensor:
    return example_keys(key, ids, GRADIENT_NOISE)


# ---- a run, and those who remember it


class Answer(NamedTuple):
    """One epoch for an adversary that knows the model: all but label and noise."""

    sent: Tensor  # (rows, cut_dim)
    moves: Tensor  # J, (rows, cut_dim)
    probabilities: Tensor  # (rows,)

    def measured(self) -> Tensor:
        """Return the answer's statement about y: p minus the part along J, in units of J."""
        along = (self.sent * self.moves).sum(dim=1) / self.moves.square().sum(dim=1)
        return self.probabilities - along


class Epoch(NamedTuple):
    """The raw side of one epoch."""

    raw: Tensor
    labels: Tensor
    moves: Tensor
    probabilities: Tensor

    def asks(self, keys: Tensor | None = None) -> Step:
        keys = keys_of(IDS) if keys is None else keys
        return Step(self.raw, self.labels, keys, self.probabilities, slopes=self.moves)

    def sends(self, sent: Tensor) -> Answer:
        return Answer(sent, self.moves, self.probabilities)


def epochs_of_a_run(num_epochs: int, *, linear_head: bool = True) -> list[Epoch]:
    """Simulate gradients (p - y) J of a model that learns: p moves to y, J turns and shrinks."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = (torch.rand(len(IDS), generator=generator) < 0.3).double()
    ease, offset, start, turn = normal(len(IDS)), normal(len(IDS)), normal(CUT_DIM), normal(CUT_DIM)
    own = 0.0 if linear_head else 0.3 * normal(len(IDS), CUT_DIM)
    epochs = []
    for epoch in range(num_epochs):
        learned = 1.5 * epoch / max(num_epochs - 1, 1)
        probabilities = torch.sigmoid(
            learned * (2 * labels - 1) * (1 + 0.5 * ease) + 0.3 * offset - 0.8
        )
        direction = start + turn * epoch / 10
        moves = (direction + own).expand(len(IDS), CUT_DIM) / (1 + 0.05 * epoch) / len(IDS)
        raw = (probabilities - labels)[:, None] * moves
        epochs.append(Epoch(raw, labels, moves, probabilities))
    return epochs


def defended(settings: DefenseSettings, epochs: list[Epoch]) -> list[Answer]:
    defense = build_defense(settings, KEY)
    return [epoch.sends(defense.defend(epoch.asks()).gradient) for epoch in epochs]


def added_up(answers: list[Answer]) -> Tensor:
    """Score by the mean of what all answers say: the best that there is against fresh noise."""
    return torch.stack([answer.measured() for answer in answers]).mean(dim=0)


def solved(answers: list[Answer], noise_scales: list[Tensor]) -> Tensor:
    """Score by regression: each answer says y + scale x, with one y and one x for all of them."""
    measured = torch.stack([answer.measured() for answer in answers])
    scales = torch.stack(noise_scales)
    centred = scales - scales.mean(dim=0)
    spread = centred.square().sum(dim=0)
    noise = (centred * (measured - measured.mean(dim=0))).sum(dim=0) / spread
    return measured.mean(dim=0) - noise * scales.mean(dim=0)


def gap_in_moves(epoch: Epoch) -> Tensor:
    """The length of the gap in units of J, per row: 1 - mean p of positives + that of negatives."""
    positive = epoch.labels == 1
    contrast = epoch.probabilities[positive].mean() - epoch.probabilities[~positive].mean()
    return (1 - contrast).expand(len(epoch.labels))


def formula(noise_ratio: float) -> float:
    return NormalDist().cdf(1 / (noise_ratio * math.sqrt(2)))


@pytest.mark.parametrize(("num_epochs", "fresh_leak"), [(1, 0.638), (5, 0.785), (30, 0.973)])
def test_fresh_noise_adds_up_and_persistent_noise_does_not(
    num_epochs: int, fresh_leak: float
) -> None:
    """Marvell, power ratio 4: fresh noise follows Phi(sqrt(T/4 / 2)), persistent stays at T = 1.

    Within 0.025, of which 4,000 examples account for 0.009 (one standard error). The fresh run has
    gradients that stay, so that the formula for T equal charges is the one that applies.
    """
    assert fresh_leak == pytest.approx(NormalDist().cdf(math.sqrt(num_epochs / 4 / 2)), abs=1e-3)
    still = epochs_of_a_run(1) * num_epochs
    labels = still[0].labels
    settings = defenses.MarvellDefense(insecure_noise_seed=5)
    fresh = leak_auc(added_up(defended(settings, still)), labels)
    assert fresh == pytest.approx(fresh_leak, abs=0.025)
    for epochs in (still, epochs_of_a_run(num_epochs)):
        answers = defended(defenses.MarvellDefense(noise="persistent"), epochs)
        assert leak_auc(added_up(answers), labels) == pytest.approx(formula(2), abs=0.025)


@pytest.mark.parametrize("linear_head", [True, False])
@pytest.mark.parametrize("settings", BOUNDED, ids=named)
@pytest.mark.parametrize("num_epochs", [1, 5, 30])
def test_the_charge_bounds_what_remembering_gives(
    settings: DefenseSettings, num_epochs: int, linear_head: bool
) -> None:
    """Adding up and solving: neither passes the estimate by more than chance, nor the guarantee."""
    epochs = epochs_of_a_run(num_epochs, linear_head=linear_head)
    labels = epochs[0].labels
    answers = defended(settings, epochs)
    charge = build_defense(settings, KEY).defend(epochs[0].asks()).charge
    assert charge.noise_identity
    assert charge.adversary is Adversary.HONEST_BUT_CURIOUS
    estimate = NormalDist().cdf(math.sqrt(charge.sum_kl / 2))
    leaks = [leak_auc(added_up(answers), labels)]
    if num_epochs > 1:
        leaks.append(leak_auc(solved(answers, [gap_in_moves(epoch) for epoch in epochs]), labels))
    for leak in leaks:
        assert leak < estimate + 0.025
        assert leak <= leak_auc_bound(charge.sum_kl)


def test_a_power_that_alternates_between_1_and_4_is_solved_for() -> None:
    """The ratio k must be fixed for the run: two ratios give two equations for label and noise."""
    epochs = epochs_of_a_run(2)
    ratios = (1.0, 2.0)
    answers = [
        answer
        for epoch, ratio in zip(epochs, ratios, strict=True)
        for answer in defended(
            defenses.MarvellDefense(noise="persistent", strength=PowerRatio(power_ratio=ratio**2)),
            [epoch],
        )
    ]
    labels = epochs[0].labels
    scales = [torch.full((len(IDS),), ratio, dtype=torch.float64) for ratio in ratios]
    assert leak_auc(answers[0].measured(), labels) == pytest.approx(formula(1), abs=0.025)
    assert leak_auc(solved(answers, scales), labels) > 0.999


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (defenses.IsoDefense(noise_ratio=1.0), defenses.IsoDefense(noise_ratio=2.0)),
        (defenses.MarvellDefense(), defenses.MarvellDefense(strength=SumKl(sum_kl=0.2))),
        (defenses.IsoDefense(), defenses.MarvellDefense()),
        (defenses.MaxNormDefense(), defenses.MarvellDefense()),
    ],
)
def test_a_file_gives_every_strength_a_key_and_keeps_it(
    tmp_path: Path, first: DefenseSettings, second: DefenseSettings
) -> None:
    def key_of(settings: DefenseSettings, cut_dim: int = CUT_DIM) -> NoiseKey | None:
        chosen = settings.model_copy(update={"noise": "persistent"})
        return chosen.open_noise_key(context_of(cut_dim), tmp_path / "noise.key")

    assert key_of(first) == key_of(first)
    assert key_of(first) != key_of(second)
    by_power, by_sum = (
        key_of(defenses.MarvellDefense(strength=one))
        for one in (PowerRatio(power_ratio=4), SumKl(sum_kl=0.25))
    )
    assert by_power == by_sum  # the same strength in another unit
    assert (key_of(first) != key_of(first, 9)) is isinstance(first, defenses.IsoDefense)


# ---- the numbers themselves


def test_numbers_are_the_same_in_every_process_batch_and_order() -> None:
    whole = scalars(keys_of(IDS))
    for worker in range(3):
        part = IDS[worker::3]
        assert torch.equal(scalars(keys_of(part)), whole[worker::3])
    shuffled = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(1))
    for start in range(0, len(IDS), 97):
        rows = shuffled[start : start + 97]
        assert torch.equal(scalars(keys_of(IDS)[rows]), whole[rows])
    bits = keys_of(IDS[:1]).tolist()  # in every process: nothing is salted
    assert bits == [[-5166831539622736016, -4373157964275117855]]


def test_numbers_differ_across_ids_keys_and_purposes() -> None:
    whole = scalars(keys_of(IDS))
    assert len(set(whole.tolist())) == len(IDS)
    others = (
        scalars(keys_of(IDS, key_from_insecure_seed(2))),
        scalars(example_keys(KEY, IDS, LABEL_NOISE)),
    )
    for other in others:
        assert not (other == whole).any()
        assert abs(float(torch.corrcoef(torch.stack((whole, other)))[0, 1])) < 5 / len(IDS) ** 0.5


def test_the_name_of_a_key_tells_keys_apart_and_does_not_hold_it() -> None:
    names = {key_name(key_from_insecure_seed(seed)) for seed in range(100)}
    assert len(names) == 100
    assert KEY.hex()[:8] not in key_name(KEY)


# ---- the defenses


def batch(rows: slice | Tensor = slice(0, 512), factor: float = 1.0) -> Step:
    epoch = epochs_of_a_run(3, linear_head=False)[2]
    raw, slopes = (factor * part.float()[rows] for part in (epoch.raw, epoch.moves))
    probabilities = epoch.probabilities.float()[rows]
    keys = keys_of(IDS)[rows]
    return Step(raw, epoch.labels[rows], keys, probabilities, slopes=slopes)


def test_marvell_repeats_itself_whatever_the_batch_and_the_worker() -> None:
    settings = defenses.MarvellDefense(noise="persistent")
    whole = build_defense(settings, KEY).defend(batch()).gradient
    for rows in (slice(0, 1), slice(100, 300), slice(1, 512, 7)):
        assert torch.equal(build_defense(settings, KEY).defend(batch(rows)).gradient, whole[rows])


def test_marvell_is_unbiased_over_keys_and_of_the_power_it_reports() -> None:
    """Accepts the raw gradient and the report; rejects a mean 30 % and a power 5 % off."""
    given = batch()
    raw, labels, probabilities = given.gradients, given.labels, given.probabilities
    defense = build_defense(defenses.MarvellDefense(noise="persistent"), KEY)
    keys = (keys_of(IDS[:512], key_from_insecure_seed(seed)) for seed in range(300))
    samples = torch.stack(
        [defense.defend(replace(given, example_keys=one)).gradient for one in keys]
    ).double()
    assert probabilities is not None
    moves = moves_of(given)[0].double()
    along = ((samples - raw) * moves).sum(dim=2) / moves.square().sum(dim=1)
    error = 2 / along.numel() ** 0.5
    assert abs(float(along.mean())) < 5 * error
    assert abs(float((along + 0.3 * (probabilities - labels).abs()).mean())) > 5 * error
    answer = defense.defend(given)
    measured = float((samples - raw).square().sum(dim=2).mean())
    assert measured == pytest.approx(answer.noise_power, rel=0.02)
    assert measured != pytest.approx(1.05 * answer.noise_power, rel=0.02)


def test_iso_spends_its_power_evenly_over_all_directions() -> None:
    """Persistent along J, fresh across it, and the same variance in both. Within 3 %."""
    given = batch()
    raw = given.gradients
    defense = build_defense(defenses.IsoDefense(noise="persistent", noise_ratio=2.0), KEY)
    moves = moves_of(given)[0].double()
    units = moves / moves.norm(dim=1, keepdim=True)
    along, total = [], []
    for seed in range(200):
        asked = replace(given, example_keys=keys_of(IDS[:512], key_from_insecure_seed(seed)))
        pair = [defense.defend(asked).gradient - raw for _ in range(2)]
        components = [(noise.double() * units).sum(dim=1) for noise in pair]
        assert torch.allclose(components[0], components[1], rtol=1e-4, atol=1e-9)
        assert not torch.allclose(pair[0], pair[1], rtol=1e-2)
        along.append((components[0] / moves.norm(dim=1)).square().mean())
        total.append((pair[0].double().norm(dim=1) / moves.norm(dim=1)).square().mean())
    assert float(torch.stack(along).mean()) == pytest.approx(4 / CUT_DIM, rel=0.03)
    assert float(torch.stack(total).mean()) == pytest.approx(4, rel=0.03)


def test_an_identity_names_defense_strength_and_key_and_nothing_else_changes_it() -> None:
    def identity(settings: DefenseSettings, key: NoiseKey = KEY) -> bytes:
        return build_defense(settings, key).defend(batch()).charge.noise_identity

    marvell = defenses.MarvellDefense(noise="persistent")
    others = {
        identity(defenses.MarvellDefense(noise="persistent", strength=PowerRatio(power_ratio=9))),
        identity(marvell, key_from_insecure_seed(2)),
        identity(defenses.IsoDefense(noise="persistent")),
        identity(defenses.IsoDefense(noise="persistent", noise_ratio=2)),
        identity(defenses.MarvellDefense()),
    }
    assert identity(marvell) == identity(marvell)
    assert len(others | {identity(marvell)}) == 6
    assert KEY.hex() not in str(identity(marvell))


def test_rows_that_the_model_is_sure_of_are_not_sent_bare() -> None:
    """p = y: the raw gradient of such a row is zero."""
    epoch = epochs_of_a_run(1)[0]
    probabilities, raw = epoch.probabilities.clone(), epoch.raw.clone()
    probabilities[:10], raw[:10] = epoch.labels[:10], 0.0
    defense = build_defense(defenses.MarvellDefense(noise="persistent"), KEY)
    sent = defense.defend(replace(epoch.asks(), gradients=raw, probabilities=probabilities))[0]
    assert float(sent[:10].norm(dim=1).min()) > 0


@pytest.mark.parametrize("settings", BOUNDED, ids=named)
def test_what_is_needed_is_asked_for(settings: DefenseSettings) -> None:
    given, defense = batch(), build_defense(settings, KEY)
    assert given.example_keys is not None
    assert given.probabilities is not None
    for wrong, said in (
        (replace(given, example_keys=None), "example keys"),
        (replace(given, example_keys=given.example_keys[1:]), "example keys"),
        (replace(given, probabilities=given.probabilities[1:]), "probabilities"),
        (replace(given, probabilities=given.probabilities + 1), "between 0 and 1"),
        (replace(given, slopes=None), "expected slopes"),
        (replace(given, slopes=given.gradients[:1]), "expected slopes"),
    ):
        with pytest.raises(ValueError, match=said):
            defense.defend(wrong)
    with pytest.raises(ValueError, match="noise key"):
        build_defense(settings)


@pytest.mark.parametrize("surety", [0.5, 2.0**-12, 1.0])
def test_an_answer_is_a_function_of_prediction_slope_and_noisy_label_alone(
    monkeypatch: pytest.MonkeyPatch, surety: float
) -> None:
    """Label 1 with noise k x + 1 gets the bits of label 0 with noise k x.

    Added to the raw gradient, the same noise leaves rounding that tells the two apart.
    """
    generator = torch.Generator().manual_seed(5)
    slopes = torch.randn(400, 8, generator=generator)
    probabilities = (surety * torch.rand(400, generator=generator)).clamp(max=1.0)
    numbers = torch.randn(400, generator=generator, dtype=torch.float64)
    keys = torch.zeros(400, 2, dtype=torch.int64)

    def answers(label: float) -> tuple[Tensor, Tensor]:
        labels = torch.full((400,), label)
        raw = (probabilities - labels)[:, None] * slopes
        batch = Step(raw, labels, keys, probabilities, slopes=slopes)
        own = (numbers + label)[:, None]
        monkeypatch.setattr(persistent, "own_scalars", lambda *_: own)
        return noisy_rows(batch, moves_of(batch)[0], 1.0).float(), (raw + own * slopes).float()

    (ours, plain), (also_ours, also_plain) = answers(0.0), answers(1.0)
    assert torch.equal(ours, also_ours)
    assert not torch.equal(plain, also_plain)
