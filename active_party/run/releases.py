"""The releases of a run: each is drawn once, written to disk, charged, and only then used.

A defense with stages reveals sums over the labels of all training rows, with noise, and computes
everything else that it sends from them. A stage begins before the first answer of its epoch. Its
release is a function of the run's secret and of what is summed; a party that was killed takes the
release that is on disk, and never draws another one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from splitveil.active_party.defenses.projected.stages import StageRelease
from splitveil.active_party.ledger.budget import LeakBudget
from splitveil.active_party.run.questions import AnsweredQuestions
from splitveil.common.errors import OtherAnswer, StorageError
from splitveil.common.record.release_file import LOST, ReleaseFile
from splitveil.common.run.sample_order import Positions

_DESIGN = "design"
_TAG = "tag"
"""A fingerprint of the other parts under the run's secret: it finds damage, and other runs' files.
"""


class Releases:
    """Begins the stages of a run."""

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

    def check(self) -> None:
        """Check that every release that was used is still there and whole."""
        stage = 0
        while self._find(stage) is not None:
            stage += 1

    def begin(self, pending: StageRelease) -> None:
        """Begin a stage with its release, which is the stored one if there is one.

        A release beyond the leak budget is neither drawn nor used; nor is one that was used before
        and is lost, or was made with another design.
        """
        stage = pending.stage
        found, known = self._find(stage), self._questions.released(stage)
        if found is not None:
            _check_design(found, pending)
        if known is not None and known.charge != self._budget.entry_of(pending.charge):
            raise _other_arithmetic(stage)
        # A run that has caught up with every answer has this charge on its course as well: its
        # process was killed before the answer that follows the release.
        if known is None or self._budget.accounts.is_behind:
            self._budget.admit(
                self.positions,
                self._budget.entry_of(pending.charge),
                f"stage {stage + 1}",
                is_repeated=known is not None,
                log=lambda: self._draw(pending),
            )
        release = self._file.at(stage)
        if release is None:
            raise RuntimeError(f"stage {stage} was admitted without a release")
        pending.use(release)

    def _find(self, stage: int) -> Mapping[str, Tensor] | None:
        release, known = self._file.at(stage), self._questions.released(stage)
        if release is None:
            if known is not None:
                raise StorageError(f"the release of stage {stage + 1} is missing: {LOST}")
            return None
        tag = self._tag(stage, release)
        is_whole = _TAG in release and torch.equal(release[_TAG], _as_tensor(tag))
        if not is_whole or (known is not None and known.reply != tag):
            raise StorageError(
                f"the release of stage {stage + 1} is damaged, or of another run: {LOST}"
            )
        return release

    def _draw(self, pending: StageRelease) -> None:
        stage = pending.stage
        release = self._file.at(stage)
        if release is None:
            key = self._questions.release_key(stage, pending.design)
            release = {**pending.draw(key), _DESIGN: _as_tensor(pending.design)}
            release[_TAG] = _as_tensor(self._tag(stage, release))
            self._file.keep(stage, release)
        if self._questions.released(stage) is None:
            tag = self._tag(stage, release)
            self._questions.record_release(stage, tag, self._budget.entry_of(pending.charge))

    def _tag(self, stage: int, release: Mapping[str, Tensor]) -> bytes:
        parts = {name: values for name, values in release.items() if name != _TAG}
        return self._questions.release_tag(stage, _as_bytes(parts))


def _check_design(release: Mapping[str, Tensor], pending: StageRelease) -> None:
    if _DESIGN not in release or not torch.equal(release[_DESIGN], _as_tensor(pending.design)):
        raise _other_arithmetic(pending.stage)


def _other_arithmetic(stage: int) -> OtherAnswer:
    return OtherAnswer(
        f"stage {stage + 1}: the labels would be summed in another way than before: the "
        f"arithmetic or the defense's settings have changed; restore those, or start over with "
        f"--fresh at both parties"
    )


def _as_tensor(digest: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _as_bytes(release: Mapping[str, Tensor]) -> Tensor:
    """Return a release as one tensor of bytes, part by part in the order of their names."""
    parts = [release[name].detach().cpu().contiguous() for name in sorted(release)]
    return torch.cat([part.flatten().view(torch.uint8) for part in parts])
