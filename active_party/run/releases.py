"""The releases of a run: each is drawn once, written to disk, charged, and only then used.

A defense with stages tells sums over the labels of all training rows, with noise, and computes
everything else that it sends from them. A stage begins before the first answer of its epoch. Its
release is a function of the run's secret and of what is summed; a party that was killed takes the
release that is on disk, and never draws another one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import PendingRelease
from splitveil.active_party.ledger.budget import LeakBudget
from splitveil.active_party.run.questions import AnsweredQuestions
from splitveil.common.errors import OtherAnswer, StorageError
from splitveil.common.run.sample_order import Positions
from splitveil.common.storage.answer_log import ChargedAnswer
from splitveil.common.storage.release_file import LOST, ReleaseFile

_DESIGN = "design"


class Releases:
    """Begins the stages of a run.

    Args:
        file: the releases on disk.
        questions: the log of everything that was told.
        budget: decides whether a release may be used.
        positions: of the training rows that the releases are about.
    """

    def __init__(
        self,
        file: ReleaseFile,
        questions: AnsweredQuestions,
        budget: LeakBudget,
        positions: Positions,
    ) -> None:
        self._file = file
        self._questions = questions
        self._budget = budget
        self.positions = positions

    def begin(self, pending: PendingRelease) -> None:
        """Begin a stage with its release, the stored one if there is one.

        Raises:
            OtherAnswer: the stage was begun before with another design.
            StorageError: the release was used before and is lost or damaged, or cannot be written.
            BudgetExhausted: the release would exceed the leak budget; it is not used.
        """
        stage, charge = pending.stage, self._budget.entry_of(pending.charge)
        release = self._file.at(stage)
        known = self._questions.released(stage)
        if release is None:
            if known is not None:
                raise StorageError(f"the release of stage {stage + 1} is missing: {LOST}")
            release = self._drawn(pending)
        tag = self._questions.release_tag(stage, _as_bytes(release))
        if known is not None and (known.reply, known.charge) != (tag, charge):
            raise StorageError(f"the release of stage {stage + 1} is damaged: {LOST}")
        if _DESIGN not in release or not torch.equal(release[_DESIGN], _as_tensor(pending.design)):
            raise OtherAnswer(
                f"stage {stage + 1}: the labels would be summed in another way than before: the "
                f"arithmetic or the defense's settings have changed; restore those, or start over "
                f"with --fresh at both parties"
            )
        self._budget.admit(
            self.positions,
            charge,
            f"stage {stage + 1}",
            is_repeated=known is not None,
            log=lambda: self._record(stage, tag, charge),
        )
        pending.use(release)

    def _drawn(self, pending: PendingRelease) -> Mapping[str, Tensor]:
        key = self._questions.release_key(pending.stage, pending.design)
        release = {**pending.draw(key), _DESIGN: _as_tensor(pending.design)}
        self._file.keep(pending.stage, release)
        return release

    def _record(self, stage: int, tag: bytes, charge: ChargedAnswer) -> None:
        if self._questions.released(stage) is None:
            self._questions.record_release(stage, tag, charge)


def _as_tensor(digest: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _as_bytes(release: Mapping[str, Tensor]) -> Tensor:
    """Return a release as one tensor of bytes, part by part in the order of their names."""
    parts = [release[name].detach().cpu().contiguous() for name in sorted(release)]
    return torch.cat([part.flatten().view(torch.uint8) for part in parts])
