"""Defenses called on a gradient in a training loop of one's own: the bits and charges of a run."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitveil import Ledger, SettingsError, defenses
from splitveil.active_party.defenses import section as sections
from splitveil.active_party.defenses.interface import Defense, Step
from splitveil.active_party.defenses.noise import AnswerKeys
from splitveil.active_party.defenses.section import DefenseSection
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.run.sample_order import Positions
from splitveil.common.settings import apply_overrides
from splitveil.library.choices import named_defense, section
from tests.support.runs import build_parties, run_in_process, write_example

GRADIENTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
LABELS = (torch.arange(12) % 3 == 0).float()


@pytest.mark.parametrize(
    "chosen",
    [
        defenses.Marvell(power_ratio=4),
        defenses.Marvell(leak_auc=0.7, statistics="running"),
        defenses.Iso(noise_ratio=2.0),
        defenses.MaxNorm(),
        defenses.MaxNormPositive(),
        defenses.NoDefense(),
    ],
    ids=lambda chosen: str(chosen.title),
)
def test_a_call_answers_and_charges_as_a_run_does_for_the_same_batches_and_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: DefenseSection
) -> None:
    """Also for batches of one class, which are compared with the batches before them."""
    write_example(tmp_path, rows=120)
    both = ["contract.batch_size=6"]
    parties = build_parties(tmp_path, [*both, f"defense={named_defense(chosen).settings}"], both)
    steps: list[tuple[Positions, Step]] = []
    keys: list[bytes] = []
    real_gradient, real_key = TopTrainer.gradient, AnswerKeys.__call__

    def gradient(self: TopTrainer, positions: Positions, *given: Any) -> Step:
        steps.append((positions, real_gradient(self, positions, *given)))
        return steps[-1][1]

    def key(self: AnswerKeys) -> bytes:
        keys.append(real_key(self))
        return keys[-1]

    monkeypatch.setattr(TopTrainer, "gradient", gradient)
    monkeypatch.setattr(AnswerKeys, "__call__", key)
    run_in_process(parties)
    assert any(len(set(step.labels.tolist())) == 1 for _, step in steps)

    monkeypatch.setattr(sections, "fresh_key", iter(keys).__next__)
    ledger = Ledger(1 + max(int(positions.max()) for positions, _ in steps))
    for positions, step in steps:
        known = None if step.probabilities is None else step.probabilities.numpy()
        answer = chosen(step.gradients, step.labels, probabilities=known)
        assert torch.equal(answer.gradient, step.defended.gradient)
        assert answer[1:] == step.defended[1:]
        ledger.charge(answer.charge, torch.from_numpy(positions.copy()))
    trained = np.unique(np.concatenate([positions for positions, _ in steps]))
    assert ledger.guarantee(trained) == parties.session.leak_bounds()


def test_a_call_forgets_no_batch_and_a_copy_begins_anew() -> None:
    negatives, other = torch.zeros(12), torch.randn(12, 3)
    marvell = defenses.Marvell(power_ratio=4, insecure_noise_seed=1)
    alone = marvell(GRADIENTS, negatives).gradient
    marvell(GRADIENTS, LABELS)
    answer = marvell(GRADIENTS, negatives)
    assert answer.solution is not None
    stronger = marvell.model_copy(update={"strength": defenses.Marvell(power_ratio=400).strength})
    pickled = pickle.loads(pickle.dumps(marvell))  # noqa: S301
    copies = copy.copy(marvell), copy.deepcopy(marvell), pickled
    for anew in (stronger, *copies):
        # Neither has to be a tensor.
        assert torch.equal(anew(GRADIENTS.numpy(), negatives.tolist()).gradient, alone)
    assert all(marvell == one for one in copies)
    assert stronger(GRADIENTS, LABELS).charge.sum_kl < 0.01
    with pytest.raises(ValueError, match=r"rows of shape \(4,\) and 2 classes.*got \(3,\) and 2"):
        marvell(other, LABELS)
    with pytest.raises(ValueError, match="labels must be 0 or 1"):
        marvell(GRADIENTS, LABELS + 1)


def test_fresh_noise_neither_reads_nor_moves_torchs_generator() -> None:
    marvell, sent = defenses.Marvell(power_ratio=4), []
    for _ in range(2):
        torch.manual_seed(7)
        sent.append(marvell(GRADIENTS, LABELS).gradient)
        after = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(after, torch.rand(3))
    assert not torch.equal(*sent)


class Half(Defense):
    def __init__(self, _context: object, _noise: object) -> None:
        pass

    def defend(self, batch: Step) -> defenses.Defended:
        sent = defenses.release(batch.gradients / 2, batch.gradients)
        return defenses.Defended(sent)


class Replacing(Half):
    def targets(self, batch: Step) -> torch.Tensor:
        return torch.zeros_like(batch.labels)


def test_defenses_of_one_s_own_and_several_classes_are_called_alike() -> None:
    for own in (Half, lambda gradients, *_: gradients / 2):
        assert torch.equal(defenses.own(own)(GRADIENTS, LABELS).gradient, GRADIENTS / 2)
    answer = defenses.Marvell(power_ratio=4)(GRADIENTS, torch.arange(12) % 3, num_classes=3)
    assert 0 < answer.charge.sum_kl < 1


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (defenses.NoisyLabel(kind="laplace", epsilon=1), "noisy_label replaces labels"),
        (defenses.own(Replacing), "custom replaces labels"),
        (defenses.Gafm(), "gafm has a loss of its own"),
        (defenses.Marvell(noise="persistent"), "marvell with noise: persistent needs ids"),
        (defenses.MaxNorm(noise="persistent"), "max_norm with noise: persistent needs ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_defense_that_needs_more_than_a_gradient_says_what_to_use(
    chosen: DefenseSection, reason: str
) -> None:
    with pytest.raises(SettingsError, match=rf"{reason}.*expected simulate.*noise: fresh"):
        chosen(GRADIENTS, LABELS)


FLAT = {"name": "marvell", "power_ratio": 8}


@pytest.mark.parametrize(
    "choice",
    [
        "marvell:power_ratio=8",
        "marvell:strength.power_ratio=8",
        "{name: marvell, power_ratio: 8}",
        FLAT,
        defenses.Marvell(power_ratio=8),
        {"name": "gafm", "composed_with": FLAT},
    ],
    ids=str,
)
def test_a_strength_is_spelt_alike_everywhere(choice: Any) -> None:
    chosen = section(named_defense(choice).settings)
    expected = defenses.Marvell(strength={"power_ratio": 8})
    assert expected == (chosen.composed_with if isinstance(chosen, defenses.Gafm) else chosen)
    file = apply_overrides({"defense": {"name": "marvell"}}, ["defense.power_ratio=8"])
    assert section(file["defense"]) == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"powr_ratio": 4}, "marvell: powr_ratio: unknown setting; did you mean"),
        ({"power_ratio": 4, "leak_auc": 0.6}, "marvell: strength: expected exactly one of"),
        ({"power_ratio": 4, "strength": {"power_ratio": 8}}, "marvell: power_ratio: unknown"),
        ({"power_ratio": 0}, "marvell: strength.*power_ratio: expected more than 0"),
    ],
)
def test_a_call_s_mistakes_are_explained_as_those_of_a_file(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=f"^{problem}"):
        defenses.Marvell(**settings)
