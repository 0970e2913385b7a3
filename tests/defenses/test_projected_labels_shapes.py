"""Projected labels with every form of run and every model."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support import several, simulation
from tests.support.programs import ROOT
from tests.support.projected import (
    DEFENSE,
    MU,
    SMALL,
    assert_bounded,
    build,
    defense,
    note_draws,
    refitted,
)
from tests.support.runs import run_in_process
from tests.support.several import build_several, write_several

# ---- forms of a run ----


@pytest.mark.parametrize(
    ("active", "both"),
    [
        ((), ("contract.cut_shape=[1]",)),
        ((), ("contract.cut_shape=[2,3]",)),
        ((), ("contract.cut_dtype=float16",)),
        ((), ("contract.drop_last=true", "contract.batch_size=50")),
        ((), ("contract.batch_size=5000", "contract.evaluation_batch_size=5000")),
        ((), ("contract.epochs=1",)),
        ((defense(stages=1),), ("contract.epochs=3",)),
        ((defense(stages=100),), ("contract.epochs=3",)),
        ((defense(rank=1),), ()),
        ((defense(rank=1024),), ()),  # more than there are rows
        ((defense(memory=1, stages=4), "data.features=null"), ("contract.epochs=4",)),
        (("top_model={kind: mlp, hidden: []}", "optimizer={kind: sgd}"), ()),
        ((), ("contract.split={kind: hash, train: 0.8, validation: 0, test: 0.2}",)),
        (("refit={epochs: 3}",), ("contract.schedule={warmup_steps: 3}",)),
    ],
)
def test_a_run_of_any_form_keeps_its_bound(
    example: Path, active: Sequence[str], both: Sequence[str]
) -> None:
    parties = build(example, *both, *active, both=[*SMALL, *both])
    run_in_process(parties)
    assert_bounded(parties)
    assert all(bool(value.isfinite().all()) for value in refitted(parties).values())


@pytest.mark.parametrize("aggregation", ["mean", "sum", "concat"])
def test_one_release_is_made_for_all_passive_parties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    write_several(tmp_path, 2, rows=200)
    drawn = note_draws(monkeypatch)
    everybody = build_several(tmp_path, [*SMALL, f"contract.aggregation={aggregation}"], [DEFENSE])
    several.run_in_process(everybody)
    assert drawn == [0, 1]
    assert everybody.session.leak_bounds().sum_kl.max == pytest.approx(MU**2, rel=1e-4)
    batches = {name: len(party.seen.received) for name, party in everybody.passive.items()}
    assert len(set(batches.values())) == 1


@pytest.mark.parametrize("name", ["digits", "vehicle"])
def test_the_examples_of_several_classes_run_with_it(name: str) -> None:
    if name != "digits" and "SPLITVEIL_DATA" not in os.environ:
        pytest.skip("SPLITVEIL_DATA names no folder with data sets")
    folder = ROOT / "deploy" / "examples" / name
    both = ["contract.epochs=2", "security={mode: insecure}", "torch_threads=1", "device=cpu"]
    settings = simulation.read_settings(folder, [*both, defense(rank=16)], both)
    run = simulation.build(settings)
    run.meet()
    assert run.active.session.leak_bounds().sum_kl.max == pytest.approx(MU**2, rel=1e-4)
    assert run.active.seen.evaluations[-1].auc > 0.6


# ---- models ----


class WithoutLinear(nn.Module):
    """Has no layer whose inputs could be listened to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, activation: Tensor, _features: object) -> Tensor:
        return activation @ self.weight


class Deep(nn.Module):
    """Uses one linear layer for each value of a row, and a buffer that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(1, 3)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, activation: Tensor, _features: object) -> Tensor:
        return torch.tanh(self.each(self.norm(activation).unsqueeze(2))).sum(dim=(1, 2))


@pytest.mark.parametrize("own", [WithoutLinear, Deep])
def test_models_of_the_user_s_own(example: Path, own: type[nn.Module]) -> None:
    parties = build(example, f"top_model={{kind: custom, module: '{__name__}:{own.__name__}'}}")
    run_in_process(parties)
    assert_bounded(parties)
    before = {name: value.clone() for name, value in parties.weights().items()}
    refitted(parties)
    after = parties.weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())
