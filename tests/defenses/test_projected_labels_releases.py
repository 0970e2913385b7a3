"""The releases of a run: drawn once, kept for their owner alone, and refused if they are lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from splitveil.active_party.defenses.projected import stages
from splitveil.active_party.defenses.projected.stages import ProjectedLabels
from splitveil.active_party.run.answering import Answering
from splitveil.active_party.run.questions import AnsweredQuestions
from splitveil.active_party.run.stages import Stage
from splitveil.common.errors import BudgetExhausted, OtherAnswer, StorageError
from splitveil.common.record.release_file import RELEASES, ReleaseFile
from tests.support.peers import Lost, dying
from tests.support.projected import (
    Silent,
    Strike,
    build,
    defense,
    note_draws,
    projected,
    releases_in,
    resume,
)
from tests.support.runs import Parties, run_in_process

IN_EPOCH_2 = 13
"""A message after which both stages have begun, one step beyond a checkpoint."""


def file_in(runs: Path) -> Path:
    return runs / "active" / "checkpoint" / RELEASES


def killed(example: Path, runs: Path, *active: str, at: int = IN_EPOCH_2) -> Parties:
    parties = build(example, *active, runs=runs)
    with pytest.raises(Lost):
        run_in_process(parties, dying(at, after=True))
    return parties


def test_the_file_is_its_owner_s_alone_and_holds_no_label(example: Path, tmp_path: Path) -> None:
    parties = build(example, runs=tmp_path)
    run_in_process(parties)
    path = file_in(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(path.parent.glob("*.tmp"))
    stored = load_file(path)
    assert {name.partition(".")[2] for name in stored} == {"sums", "sigma", "design", "tag"}
    for stage, rank in enumerate((8, 4)):
        assert stored[f"{stage}.sums"].shape == (rank,)
        assert stored[f"{stage}.sums"].dtype == torch.float64
        assert stored[f"{stage}.sigma"].item() == projected(parties).sigma_of(stage)


def test_what_a_stage_asks_for_is_computed_before_a_peer_waits_and_drawn_only_then(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for owner, name in (
        (stages, "design"),
        (ProjectedLabels, "draw"),
        (Answering, "answer"),
    ):
        real = getattr(owner, name)

        def noting(*given: Any, _name: str = name, _real: Any = real, **named: Any) -> Any:
            events.append(_name)
            return _real(*given, **named)

        monkeypatch.setattr(owner, name, noting)
    run_in_process(build(example))
    assert "".join(events).count("designanswerdraw") == events.count("design") == 2


def test_it_outlives_the_run_and_the_next_run_begins_without_it(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(build(example, runs=tmp_path))
    first = releases_in(tmp_path)
    drawn = note_draws(monkeypatch)
    (tmp_path / "active" / "checkpoint" / "run.state").unlink()
    (tmp_path / "passive" / "checkpoint" / "run.state").unlink()
    for state in tmp_path.glob("*/checkpoint/at-*.state"):
        state.unlink()
    again = build(example, "defense.insecure_noise_seed=8", runs=tmp_path)
    run_in_process(again)
    assert drawn == [0, 1]
    assert not torch.equal(releases_in(tmp_path)["0.sums"], first["0.sums"])


# ---- lost and damaged files ----


def flip(path: Path, name: str) -> None:
    """Change one bit of one tensor, in a file that is otherwise whole."""
    stored = load_file(path)
    stored[name].view(-1).view(torch.uint8)[3] ^= 1
    save_file(stored, path)


def without_a_stage(path: Path) -> None:
    save_file({n: value for n, value in load_file(path).items() if not n.startswith("0.")}, path)


def exchanged(path: Path) -> None:
    stored = load_file(path)
    save_file({f"{1 - int(name[0])}{name[1:]}": value for name, value in stored.items()}, path)


HARM: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no tensors": lambda path: save_file({}, path),
    "a stage is missing": without_a_stage,
    "of no stage": lambda path: save_file({"sums": torch.zeros(3)}, path),
    "other sums": lambda path: flip(path, "0.sums"),
    "another sigma": lambda path: flip(path, "1.sigma"),
    "another tag": lambda path: flip(path, "1.tag"),
    "stages exchanged": exchanged,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("harm", HARM)
def test_a_run_whose_releases_are_not_what_they_were_is_refused_and_draws_none(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    killed(example, tmp_path)
    whole = file_in(tmp_path).read_bytes()
    drawn = note_draws(monkeypatch)
    HARM[harm](file_in(tmp_path))
    harmed = file_in(tmp_path).read_bytes() if file_in(tmp_path).exists() else None
    second = build(example, runs=tmp_path)
    with pytest.raises(StorageError) as caught:
        second.session.reopen()
    message = str(caught.value)
    assert "restore a copy of the file, or start over with --fresh at both parties" in message
    assert "\n" not in message
    assert caught.value.exit_code == 1
    assert drawn == []
    if harmed is not None:
        assert file_in(tmp_path).read_bytes() == harmed
    file_in(tmp_path).write_bytes(whole)
    third = build(example, runs=tmp_path)
    resume(third)
    assert third.session.stage is Stage.FINISHED


@pytest.mark.parametrize("is_logged", [False, True])
def test_the_releases_of_another_run_are_refused(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_logged: bool
) -> None:
    """Of the same data and settings; without a log record, too, after a crash in between."""
    run_in_process(build(example, "defense.insecure_noise_seed=8", runs=tmp_path / "other"))
    with pytest.MonkeyPatch.context() as patched:
        Strike(AnsweredQuestions, "record_release", after=is_logged).arm(patched)
        with pytest.raises(Lost):
            run_in_process(build(example, runs=tmp_path / "own"), Silent)
    shutil.copy(file_in(tmp_path / "other"), file_in(tmp_path / "own"))
    drawn = note_draws(monkeypatch)
    with pytest.raises(StorageError, match="damaged, or of another run"):
        build(example, runs=tmp_path / "own").session.reopen()
    assert drawn == []


def test_a_file_that_cannot_be_read_is_an_error_of_the_disk(example: Path, tmp_path: Path) -> None:
    killed(example, tmp_path)
    file_in(tmp_path).unlink()
    file_in(tmp_path).mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        build(example, runs=tmp_path).session.reopen()


def test_a_release_that_cannot_be_written_is_not_used(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageError("no room")

    first = build(example, runs=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("splitveil.common.record.release_file.write_bytes_atomically", full)
        with pytest.raises(StorageError, match="no room"):
            run_in_process(first)
    assert first.session.stage is Stage.ENDED
    assert first.active.sent == []
    assert first.session.leak_bounds().sum_kl.max == 0
    second = build(example, runs=tmp_path)
    resume(second)
    assert second.session.leak_bounds().sum_kl.max > 0


def test_no_stage_is_kept_twice(tmp_path: Path) -> None:
    file = ReleaseFile(tmp_path)
    file.keep(0, {"sums": torch.ones(2)})
    with pytest.raises(ValueError, match="has a release already"):
        file.keep(0, {"sums": torch.ones(2)})


# ---- a crash in between ----


def test_a_release_that_was_written_and_not_logged_is_the_one_that_is_used(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without seeds, so that a second draw would be another one."""
    unseeded = "defense={name: projected_labels, stages: 2, rank: 8}"
    drawn = note_draws(monkeypatch)
    with pytest.MonkeyPatch.context() as patched:
        Strike(AnsweredQuestions, "record_release").arm(patched)
        with pytest.raises(Lost):
            run_in_process(build(example, unseeded, runs=tmp_path), Silent)
    written = releases_in(tmp_path)
    second = build(example, unseeded, runs=tmp_path)
    resume(second)
    after = releases_in(tmp_path)
    assert drawn == [0, 1]
    assert all(torch.equal(after[name], value) for name, value in written.items())
    assert len(written) == len(after) // 2
    mu = second.active_settings.defense.strength.of_run  # type: ignore[union-attr]
    assert second.session.leak_bounds().sum_kl.max == pytest.approx(mu**2)


# ---- other settings or arithmetic ----


@pytest.mark.parametrize(
    "changed",
    [
        defense(strength="{leak_auc: 0.7}"),
        defense(strength="{mu: 0.1}"),
        defense(rank=7),
        defense(stages=1),
        "arithmetic",  # as on another device: the design of the same activations is another one
    ],
)
def test_a_stage_that_would_begin_again_in_another_way_is_refused(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """The run goes back to before its first stage, with other settings than it began with."""
    killed(example, tmp_path, at=5)
    before = file_in(tmp_path).read_bytes()
    drawn = note_draws(monkeypatch)
    second = build(example, *([] if changed == "arithmetic" else [changed]), runs=tmp_path)
    with monkeypatch.context() as patched:
        if changed == "arithmetic":
            design = "splitveil.active_party.defenses.projected.design"
            patched.setattr(f"{design}._NEGLIGIBLE", 0.3)
        with pytest.raises(
            OtherAnswer, match=r"stage 1: .*restore those, or start over with --fresh"
        ):
            resume(second)
    assert drawn == []
    assert second.active.sent == []
    assert file_in(tmp_path).read_bytes() == before
    third = build(example, runs=tmp_path)
    resume(third)
    assert third.session.stage is Stage.FINISHED


def test_targets_made_in_another_way_give_no_second_answer(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another memory sums the labels as before; the answers that were given are still others."""
    wide = defense(rank=64, memory=1)
    monkeypatch.setattr("splitveil.active_party.defenses.projected.settings.MIB", 2**12)
    killed(example, tmp_path, defense(rank=64, memory=256), at=IN_EPOCH_2 + 1)
    drawn = note_draws(monkeypatch)
    for state in (tmp_path / "active" / "checkpoint").glob("at-000000001[3-9].state"):
        state.unlink()
    second = build(example, wide, runs=tmp_path)
    with pytest.raises(OtherAnswer):
        resume(second)
    assert drawn == []
    assert second.active.sent == []


# ---- the budget ----


def mu_squared(parties: Parties) -> float:
    return float(parties.session.leak_bounds().sum_kl.max)


def test_a_run_that_the_budget_does_not_hold_draws_writes_and_uses_nothing(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = note_draws(monkeypatch)
    strong = defense(strength="{mu: 0.3}")
    parties = build(example, strong, "run_budget={sum_kl: 0.0899}", runs=tmp_path)
    with pytest.raises(BudgetExhausted, match="stage 1 would take"):
        run_in_process(parties)
    assert drawn == []
    assert releases_in(tmp_path) == {}
    assert mu_squared(parties) == 0
    assert parties.passive.received == []
    # A larger budget resumes the run.
    again = build(example, strong, "run_budget={sum_kl: 0.09}", runs=tmp_path)
    resume(again)
    assert drawn == [0, 1]
    assert again.session.stage is Stage.FINISHED


def test_a_budget_that_was_lowered_holds_against_a_stage_of_before(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strong = defense(strength="{mu: 0.3}")
    with pytest.MonkeyPatch.context() as patched:
        Strike(AnsweredQuestions, "record_release", after=True).arm(patched)
        with pytest.raises(Lost):
            run_in_process(build(example, strong, runs=tmp_path), Silent)
    drawn = note_draws(monkeypatch)
    second = build(example, strong, "run_budget={sum_kl: 0.04}", runs=tmp_path)
    with pytest.raises(BudgetExhausted):
        resume(second)
    assert drawn == []
    assert second.active.sent == []
    assert mu_squared(second) == pytest.approx(0.09)


def test_each_training_row_is_charged_all_stages_at_once_and_no_other_row_is(example: Path) -> None:
    parties = build(example, defense(strength="{mu: 0.3}"))
    run_in_process(parties)
    rows, accounts = parties.active.rows, parties.session.lifecycle.answering.budget.accounts.course
    assert rows is not None
    bounds = accounts.bounds(rows.splits["train"]).sum_kl
    assert bounds.max == bounds.mean == pytest.approx(0.09)
    held_out = np.concatenate([rows.splits["validation"], rows.splits["test"]])
    assert accounts.bounds(held_out).sum_kl.max == 0
    charged = [ledger.sum_kl.max for _, ledger in parties.active.ledger]
    assert charged == [pytest.approx(0.09), pytest.approx(0.09)]
