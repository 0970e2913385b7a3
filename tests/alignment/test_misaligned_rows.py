"""Parties that mean different rows by the same positions notice it before anything is trained."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.alignment.exchange import Alignment
from splitveil.common.errors import OutOfStep
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows, run_course
from splitveil.common.run.messages import Opening
from splitveil.common.run.sample_order import joint_seed, rows_digest
from splitveil.passive_party.opening import Aligner, Peer
from tests.support.runs import CONTRACT, build_parties, run_in_process

SEED = bytes(32)
RULES = Contract.model_validate(CONTRACT)


def derived(ids: Sequence[str], rows: Sequence[int], seed: bytes = SEED) -> AlignedRows:
    return AlignedRows.derive(RULES, seed, ids, np.array(rows))


def one_row_off(ids: Sequence[str], rows: Sequence[int], seed: bytes = SEED) -> list[int]:
    """Take one row for another, such that every position and every split stays what it was."""
    right = derived(ids, rows, seed)
    for other in sorted(set(range(len(ids))) - set(rows)):
        for position in range(len(rows)):
            wrong = [other if row == right.file_rows[position] else row for row in rows]
            found = derived(ids, wrong, seed)
            same_order = np.sum(found.file_rows != right.file_rows) == 1
            same_splits = [found.splits[name].tolist() for name in found.splits] == [
                right.splits[name].tolist() for name in right.splits
            ]
            if same_order and same_splits:
                return wrong
    raise AssertionError


def test_one_other_id_changes_the_digest_of_its_batch_although_positions_are_the_same() -> None:
    ids = [f"person {number}" for number in range(80)]
    right = derived(ids, range(60))
    wrong = derived(ids, one_row_off(ids, range(60)))

    courses = [list(run_course(RULES, rows))[:20] for rows in (right, wrong)]
    pairs = list(zip(*courses, strict=True))

    assert all(np.array_equal(one.positions, other.positions) for one, other in pairs)
    assert 0 < sum(one.digest != other.digest for one, other in pairs) < len(pairs)


def test_the_digest_depends_on_the_ids_their_order_and_the_seed_and_on_no_file() -> None:
    ids = [f"person {number}" for number in range(400)]
    forward = derived(ids, list(range(400)))
    backward = derived(ids[::-1], list(range(400)))
    here = np.array([3, 1, 2])

    assert forward.digest_of(here) == backward.digest_of(here)
    assert forward.digest_of(here) != forward.digest_of(here[::-1])
    assert forward.digest_of(here) == rows_digest(forward.id_digests[here])


class OneRowOff(Aligner):
    """Mistakes one row of this party for another, as a fault of an alignment would."""

    def align(self, peer: Peer, opening: Opening, nonce: bytes, *rest: object) -> Alignment:
        found = super().align(peer, opening, nonce, *rest)  # type: ignore[arg-type]
        seed = joint_seed(opening.nonce, nonce)
        wrong = one_row_off(self.participant.ids, found.rows.tolist(), seed)
        return found._replace(rows=np.array(wrong))


def test_parties_whose_rows_differ_train_on_none_of_these_rows(example: Path) -> None:
    parties = build_parties(example)
    right = parties.run.aligner
    parties.run.aligner = OneRowOff(right.participant, right.engine, right.draw_nonce)

    with pytest.raises(OutOfStep, match="other rows"):
        run_in_process(parties)

    assert parties.session.stage is not Stage.FINISHED
