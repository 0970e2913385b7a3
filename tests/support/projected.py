"""Runs with projected labels, all that has to be equal in two of them, and faults in the middle."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

import pytest
import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import RowChunk
from splitveil.active_party.defenses.projected.design import Design, design
from splitveil.active_party.defenses.projected.features import Chunks
from splitveil.active_party.defenses.projected.stages import ProjectedLabels, StageRelease
from splitveil.active_party.ledger.bounds import LeakBounds
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.record.release_file import ReleaseFile
from tests.support.peers import Lost, Silent
from tests.support.runs import Parties, build_parties, run_in_process

__all__ = ["Silent"]

DEFENSE = "defense={name: projected_labels, stages: 2, rank: 8, insecure_noise_seed: 7}"
SMALL = ("contract.evaluation_batch_size=60", "contract.checkpoints={every_steps: 2, keep: 100}")
"""A run of the small example: 4 batches of the survey, then in each of 2 epochs 4 steps and 4
batches of held-out rows."""
SURVEY_BATCHES = 4

MU = 0.358286
"""Of the AUC .6, the default strength."""


def defense(**settings: object) -> str:
    """Return an override with a defense that is repeatable and has these settings."""
    given = {"stages": 2, "rank": 8, "insecure_noise_seed": 7, **settings}
    return f"defense={{name: projected_labels, {', '.join(f'{k}: {v}' for k, v in given.items())}}}"


def build(
    folder: Path, *active: str, both: Sequence[str] = SMALL, runs: Path | None = None
) -> Parties:
    """Build both parties of a run with projected labels; later overrides win."""
    return build_parties(folder, [*both, DEFENSE, *active], both, runs=runs)


def resume(parties: Parties) -> None:
    """Let two parties, of which some may be new, come together again."""
    parties.session.reopen()
    run_in_process(parties, Silent)


def trainer_of(parties: Parties) -> TopTrainer:
    trainer = parties.session.lifecycle.phase.trainer
    assert trainer is not None
    return trainer


def projected(parties: Parties) -> ProjectedLabels:
    """Return the defense of a run whose rows are known."""
    found = trainer_of(parties).defense
    assert isinstance(found, ProjectedLabels)
    return found


def refitted(parties: Parties) -> dict[str, Tensor]:
    """Return the weights of the top model that is fitted to the true labels after the run."""
    model = trainer_of(parties).refitted()
    assert model is not None
    return dict(model.state_dict())


def assert_bounded(parties: Parties, mu: float = MU) -> None:
    """Check what holds of every run: the charge, the sensitivity, and the range of targets."""
    assert parties.session.stage is Stage.FINISHED
    assert parties.session.leak_bounds().sum_kl.max == pytest.approx(mu**2, rel=1e-4)
    state = projected(parties).state_dict()
    stages = [name for name in state if name.startswith("posterior.steps.")]
    assert stages
    for name in stages:
        unit = state[name.replace("steps", "numbers")][0]
        norms = (state[name].double() * unit).norm(dim=1)
        assert float(norms.max()) <= 1
    targets = state["targets"]
    assert 0 <= float(targets.min()) <= float(targets.max()) <= 1
    if targets.ndim == 2:
        rows = parties.active.rows
        assert rows is not None
        sums = targets[torch.from_numpy(rows.splits["train"])].sum(dim=1)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
    assert all(bool(value.isfinite().all()) for value in parties.weights().values())


class Outcome(NamedTuple):
    """All that must not depend on faults."""

    tensors: dict[str, Tensor]
    """Weights, the refitted model, the defense's state with its targets, and the ledger."""

    evaluations: list[Evaluation]
    bounds: LeakBounds
    on_course: LeakBounds


def outcome(parties: Parties) -> Outcome:
    session = parties.session
    book = replace(session.lifecycle.phase.account_book(), runs=frozenset()).state_dict()
    tensors = {
        **parties.weights(),
        **{f"refitted.{name}": value for name, value in refitted(parties).items()},
        **{f"defense.{name}": value for name, value in projected(parties).state_dict().items()},
        **{f"ledger.{name}": value for name, value in book.items()},
    }
    return Outcome(
        tensors,
        parties.active.evaluations[-2:],
        session.leak_bounds(),
        session.lifecycle.answering.budget.bounds_on_course(),
    )


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Compare two runs bit for bit."""
    assert found.tensors.keys() == expected.tensors.keys()
    other = [
        name for name, value in found.tensors.items() if not _same(value, expected.tensors[name])
    ]
    assert other == []
    assert found[1:] == expected[1:]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def releases_in(runs: Path, party: str = "active") -> dict[str, Tensor]:
    """Return what the file of a run's releases holds, by ``<stage>.<name>``."""
    file = ReleaseFile.read(runs / party)
    found: dict[str, Tensor] = {}
    for stage in range(len(file)):
        parts = file.at(stage)
        assert parts is not None
        found |= {f"{stage}.{name}": value for name, value in parts.items()}
    return found


@dataclass
class Strike:
    """Kills the process that calls a method, once: before or after its work."""

    owner: type
    method: str
    at: int = 1
    """Which call it is, from 1."""
    after: bool = False
    calls: int = field(default=0, init=False)

    def arm(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        real: Callable[..., object] = getattr(self.owner, self.method)

        def struck(*arguments: object, **named: object) -> object:
            self.calls += 1
            if self.calls == self.at and not self.after:
                raise Lost
            result = real(*arguments, **named)
            if self.calls == self.at:
                raise Lost
            return result

        monkeypatch.setattr(self.owner, self.method, struck)
        return self


def note_draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that from now on gets the stage of every release that is drawn."""
    drawn: list[int] = []
    draw = StageRelease.draw

    def noting(self: StageRelease, key: bytes) -> Mapping[str, Tensor]:
        drawn.append(self.stage)
        return draw(self, key)

    monkeypatch.setattr(StageRelease, "draw", noting)
    return drawn


def random_design(
    seed: int, num_rows: int, rank: int, choose: Callable[[Tensor], Tensor] = Tensor.relu
) -> Design:
    """Return the design of random rows with 12 activations, which ``choose`` makes of normals."""
    generator = torch.Generator().manual_seed(seed)
    activations = choose(torch.randn(num_rows, 12, generator=generator))
    own, hidden = torch.randn(2, num_rows, 16, generator=generator)
    logits = torch.randn(num_rows, generator=generator)
    slopes = torch.rand(num_rows, 12, generator=generator) - 0.3
    chunk = RowChunk(activations, own, hidden, logits, slopes)
    return design(in_chunks(chunk, num_rows), num_rows, rank)


def in_chunks(rows: RowChunk, size: int = 128) -> Chunks:
    def chunks(stride: int) -> Iterator[RowChunk]:
        every = [None if part is None else part[::stride] for part in rows]
        for start in range(0, -(-len(rows.logits) // stride), size):
            parts = [None if part is None else part[start : start + size] for part in every]
            yield RowChunk(*parts)  # type: ignore[arg-type]

    return chunks
