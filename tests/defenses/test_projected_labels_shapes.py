"""Projected labels with every form of run and every model."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from splitveil.common.run.messages import Answer
from tests.data.test_split_by_column import BY_COLUMN, add_column
from tests.support import several, simulation
from tests.support.peers import Lost, dying
from tests.support.programs import ROOT
from tests.support.projected import (
    DEFENSE,
    MU,
    SMALL,
    assert_bounded,
    assert_same,
    build,
    defense,
    note_draws,
    outcome,
    projected,
    refitted,
    resume,
)
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, run_in_process, write_example
from tests.support.several import build_several, write_several
from tests.support.several_classes import CLASSES, write_classes

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
        ((defense(refit_top="false"),), ("contract.schedule={warmup_steps: 3}",)),
    ],
)
def test_a_run_of_any_form_keeps_its_bound(
    example: Path, active: Sequence[str], both: Sequence[str]
) -> None:
    parties = build(example, *both, *active, both=[*SMALL, *both])
    run_in_process(parties)
    assert_bounded(parties)
    assert all(bool(value.isfinite().all()) for value in refitted(parties).values())


def test_rows_that_a_column_splits_keep_it_too(tmp_path: Path) -> None:
    write_example(tmp_path)
    for party in ("active", "passive"):
        add_column(tmp_path / f"{party}.csv")
    parties = build(tmp_path, BY_COLUMN, both=[*SMALL, BY_COLUMN])
    run_in_process(parties)
    assert_bounded(parties)


@pytest.mark.parametrize("at", [3, 5, 14])
def test_with_several_classes_a_killed_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, at: int
) -> None:
    write_classes(tmp_path, rows=300)
    whole = build(tmp_path)
    run_in_process(whole)
    assert_bounded(whole)
    assert projected(whole).state_dict()["posterior.sums.1"].shape == (8, len(CLASSES))
    with pytest.raises(Lost):
        run_in_process(build(tmp_path, runs=tmp_path / "runs"), dying(at, after=True))
    second = build(tmp_path, runs=tmp_path / "runs")
    resume(second)
    assert_same(outcome(second), outcome(whole))


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


def test_with_several_parties_a_run_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    """All are started anew after the first epoch, in which they stop of themselves."""
    write_several(tmp_path, 2, rows=200)
    whole = build_several(tmp_path, SMALL, [DEFENSE])
    several.run_in_process(whole)

    class Dies(several.PartyPeer):
        """Is killed in the second epoch, with both of its kind at the same message."""

        calls = 0

        def receive_gradient(self) -> Answer:
            self.calls += 1
            if self.calls == 4:
                raise Lost
            return super().receive_gradient()

        def leave(self, *_: object) -> None:
            """Say nothing."""

    first = build_several(tmp_path, SMALL, [DEFENSE], runs=tmp_path / "runs")
    several.finish([several.start(first, name, Dies) for name in first.passive])
    assert {type(error) for error in first.errors.values()} == {Lost}
    second = build_several(tmp_path, SMALL, [DEFENSE], runs=tmp_path / "runs")
    assert second.session.reopen()
    several.run_in_process(second)
    found, expected = second.weights(), whole.weights()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert second.session.leak_bounds() == whole.session.leak_bounds()


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


def write_images(folder: Path, rows: int = 200) -> None:
    """Write images of two classes: positives are brighter in one corner."""
    generator = np.random.default_rng(3)
    labels = generator.integers(2, size=rows)
    x = generator.integers(0, 160, size=(rows, 8, 8, 3)).astype(np.uint8)
    x[:, :4, :4] += (labels * 60).astype(np.uint8)[:, None, None, None]
    np.savez(folder / "rows.npz", x=x, y=labels, name=np.array([f"i{n:04d}" for n in range(rows)]))
    source = {"source": {"kind": "npz", "path": "rows.npz"}, "id_column": "name"}
    settings = {
        "contract": {**CONTRACT, "cut_shape": [3, 2, 2]},
        "active": {
            **ACTIVE,
            "data": {**source, "label_column": "y"},
            "top_model": {"kind": "conv", "channels": [4], "hidden": [6]},
        },
        "passive": {
            **PASSIVE,
            "adversary": None,
            "data": {**source, "features": {"image": {"array": "x"}}},
            "bottom_model": {"kind": "conv", "channels": [4, 3]},
        },
    }
    for name, values in settings.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def test_images_and_convolutions(tmp_path: Path) -> None:
    write_images(tmp_path)
    parties = build(tmp_path)
    run_in_process(parties)
    assert_bounded(parties)


def write_categories(folder: Path) -> None:
    write_example(folder, rows=300)
    for party, seed in (("active", 8), ("passive", 9)):
        generator = np.random.default_rng(seed)
        lines = (folder / f"{party}.csv").read_text().splitlines()
        named = [
            f"{line},{generator.choice(['a', 'b', ''])},{n}" for n, line in enumerate(lines[1:])
        ]
        (folder / f"{party}.csv").write_text("\n".join([f"{lines[0]},kind,many", *named]) + "\n")


@pytest.mark.parametrize("at", [5, 12])
def test_a_wide_and_deep_model_with_categories_of_its_own_resumes_with_the_same_bits(
    tmp_path: Path, at: int
) -> None:
    """One of its columns has a category for each row, and its tables take sparse gradients."""
    write_categories(tmp_path)
    active = (
        "top_model={kind: wide_deep, hidden: [6]}",
        "data.features={numeric: own*, categorical: [kind, many]}",
        "optimizer={kind: adam, learning_rate: 0.01, sparse_from_rows: 2}",
    )
    whole = build(tmp_path, *active)
    run_in_process(whole)
    assert_bounded(whole)
    with pytest.raises(Lost):
        run_in_process(build(tmp_path, *active, runs=tmp_path / "runs"), dying(at, after=False))
    second = build(tmp_path, *active, runs=tmp_path / "runs")
    resume(second)
    assert_same(outcome(second), outcome(whole))


OWN_MODELS = '''
import torch
from torch import nn

class WithoutLinear(nn.Module):
    """Has no layer whose inputs could be listened to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, activation, features):
        return activation @ self.weight


class Deep(nn.Module):
    """Uses one linear layer for each value of a row, and a buffer that every step changes."""

    def __init__(self):
        super().__init__()
        self.each = nn.Linear(1, 3)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, activation, features):
        return torch.tanh(self.each(self.norm(activation).unsqueeze(2))).sum(dim=(1, 2))
'''


@pytest.mark.parametrize("name", ["WithoutLinear", "Deep"])
def test_models_of_the_user_s_own(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "own_tops.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    parties = build(example, f"top_model={{kind: custom, module: 'own_tops:{name}'}}")
    run_in_process(parties)
    assert_bounded(parties)
    before = {name: value.clone() for name, value in parties.weights().items()}
    refitted(parties)
    after = parties.weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())
