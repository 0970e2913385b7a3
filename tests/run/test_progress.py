"""A party's progress through a run's course, and the stores that keep it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.common.errors import StorageError
from splitveil.common.record.run_store import NoStore
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows, evaluations_ahead, is_checkpoint, run_course
from splitveil.common.run.progress import CheckpointStore, Progress, State, refusing_other_versions
from splitveil.common.run.sample_order import joint_seed
from splitveil.passive_party.bottom_trainer import BottomTrainer
from tests.support.runs import CONTRACT, build_parties, pipelined, run_in_process

NONCES = (b"a" * 32, b"b" * 32)
IDS = [f"person-{number}" for number in range(300)]


@pytest.fixture
def contract() -> Contract:
    return Contract(**(CONTRACT | {"checkpoint_steps": 2}))


@pytest.fixture
def rows(contract: Contract) -> AlignedRows:
    return AlignedRows.derive(contract, joint_seed(*NONCES), IDS, np.arange(300))


def test_batches_become_due_in_the_order_of_the_course(
    contract: Contract, rows: AlignedRows
) -> None:
    course = list(run_course(contract, rows))
    progress, handled = Progress(contract, rows, NoStore()), []
    while progress.due is not None:
        due = progress.due
        if progress.batch_number % 2:  # looking ahead or not, the next batch is the same
            following = course[progress.batch_number + 1 :]
            ahead = [progress.ahead(count) for count in range(1, 4)]
            expected = [batch.key for batch in following[:3]]
            assert [batch.key for batch in ahead if batch is not None] == expected
        progress.advance()
        handled.append(due.key)
        assert progress.checkpoint_due == is_checkpoint(contract, rows, due)
    assert handled == [batch.key for batch in course]
    assert progress.batch_number == len(course)
    assert progress.is_over
    assert progress.epoch is None
    assert progress.ahead(1) is None
    assert progress.checkpoint_due
    progress.go_to(2)
    assert progress.due is not None
    assert progress.due.key == course[2].key
    assert (progress.batch_number, progress.checkpoint_due) == (2, False)


def test_a_checkpoint_that_could_not_be_saved_stays_due(
    contract: Contract, rows: AlignedRows
) -> None:
    """Otherwise noisy sums could leave before this party's part of them is stored."""

    class Full(NoStore):
        keeps = True

        def _fail(self, *_: object) -> None:
            raise StorageError("the disk is full")

        save = save_soon = _fail

    progress = Progress(contract, rows, Full())
    progress.checkpoint_due = True
    with pytest.raises(StorageError):
        progress.save(dict)
    assert progress.checkpoint_due


@pytest.mark.parametrize(("is_training", "most_ahead"), [(True, 4), (False, 16)])
def test_what_is_sent_ahead_ends_with_the_pass_over_its_rows(
    contract: Contract, is_training: bool, most_ahead: int
) -> None:
    fast = contract.model_copy(update={"pipeline_depth": 4, "batch_size": 8})
    fast = fast.model_copy(update={"evaluation_batch_size": 3, "checkpoint_steps": 500})
    rows = AlignedRows.derive(fast, joint_seed(*NONCES), IDS, np.arange(300))
    progress, most = Progress(fast, rows, NoStore()), 0
    for batch in run_course(fast, rows):
        sent = list[tuple[int, str, int]]()
        due = progress.to_send if is_training else progress.to_evaluate
        while (found := due(len(sent))) is not None:
            sent.append(found.key)
        is_due = (batch.split == "train") is is_training
        assert bool(sent) is is_due
        assert all(epoch == batch.epoch for epoch, _, _ in sent)
        assert all((split == "train") is is_training for _, split, _ in sent)
        most = max(most, len(sent))
        progress.advance()
    assert most == most_ahead
    assert progress.to_send(0) is progress.to_evaluate(0) is None


@pytest.mark.parametrize(
    ("rows", "shape", "ahead"),
    [(1, [4], 16), (4096, [64], 4), (4096, [128], 2), (1024, [128], 8), (1_048_576, [128], 2)],
)
def test_the_contract_says_how_many_may_be_under_way(
    rows: int, shape: list[int], ahead: int
) -> None:
    values = {**CONTRACT, "evaluation_batch_size": rows, "cut_shape": shape}
    assert evaluations_ahead(Contract.model_validate(values)) == ahead


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_each_activation_follows_exactly_the_gradients_that_the_contract_says(
    example: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    learned: list[int] = []  # number of gradients before each activation
    count = 0
    forward, backward = BottomTrainer.forward, BottomTrainer.backward

    def noting_forward(self: BottomTrainer, *given: object, **named: object) -> torch.Tensor:
        learned.append(count)
        return forward(self, *given, **named)  # type: ignore[arg-type]

    def noting_backward(self: BottomTrainer, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal count
        count += 1
        return backward(self, gradient)

    monkeypatch.setattr(BottomTrainer, "forward", noting_forward)
    monkeypatch.setattr(BottomTrainer, "backward", noting_backward)
    both = pipelined(depth)
    parties = build_parties(example, both, both)
    run_in_process(parties)
    rows = parties.active.rows
    assert rows is not None
    per_epoch = rows.order.steps_per_epoch
    assert per_epoch > 10
    expected = []
    for step in range(2 * per_epoch):
        # Everything before the last checkpoint, and before the epoch, has been learned.
        emptied = max(step // 5 * 5, step // per_epoch * per_epoch)
        expected.append(max(emptied, step - depth + 1))
    assert learned == expected


def test_without_a_store_nothing_is_collected_for_a_checkpoint(
    contract: Contract, rows: AlignedRows
) -> None:
    def state() -> State:
        raise AssertionError("nobody keeps it")

    store: CheckpointStore = NoStore(questions_per_batch=3)
    progress = Progress(contract, rows, store)
    progress.save(state)
    store.save_run({})
    assert store.run() is None
    assert store.checkpoints() == []
    with pytest.raises(StorageError):
        store.load(0)
    answers = NoStore(questions_per_batch=3).new_answers()
    answers.record(0, [bytes(16)] * 3)
    assert answers.at(0) is not None


@pytest.mark.parametrize("error", [KeyError("epoch"), TypeError(), ValueError(), RuntimeError()])
def test_a_state_with_other_parts_is_called_another_version_s(error: Exception) -> None:
    with pytest.raises(StorageError, match="another version"), refusing_other_versions():
        raise error
