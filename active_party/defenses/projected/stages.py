"""The stages of projected labels: designs, releases and targets, in the course of a run."""

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.noise import SecureNoise
from splitveil.active_party.defenses.objective import shares_of
from splitveil.active_party.defenses.projected.design import (
    Design,
    design,
    stage_shares,
    stage_sigma,
)
from splitveil.active_party.defenses.projected.features import LabelFreeFacts
from splitveil.active_party.defenses.projected.posterior import Posterior
from splitveil.active_party.defenses.projected.release import Release, draw_release, on_label_grid
from splitveil.active_party.defenses.rows import as_rows, check_labels
from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.privacy.adversary import Adversary


class StagePlan(NamedTuple):
    """What the settings say about the stages of a run."""

    mu: float  # the bound for the whole run
    epochs: tuple[int, ...]  # at which stages begin, ascending
    rank: int
    memory_bytes: int


def stage_epochs(stages: int, epochs: int) -> tuple[int, ...]:
    """Return the epochs at which stages begin, ascending: at growing distances, at most one each.

    They are epochs * (number / count)^1.5, rounded down.
    """
    count = min(stages, epochs)
    return tuple(
        max(number, math.isqrt(epochs**2 * number**3 // count**3)) for number in range(count)
    )


class ProjectedLabels(interface.Defense):
    """Releases gradients of targets unchanged; only the sums from which targets come are charged.

    A defense built without examples has no targets.
    """

    def __init__(self, plan: StagePlan, given: interface.BuildInputs) -> None:
        self._plan = plan
        self._num_classes = given.context.num_classes
        self._epochs = plan.epochs
        self._next_stage = 0
        self._followed = -1  # the epoch whose predictions are in the targets
        self._examples = given.examples or interface.Examples(
            [], torch.zeros(0), torch.device("cpu")
        )
        _, labels, _, training, subjects, known_targets, releases = self._examples
        self._rows = torch.arange(len(labels)) if training is None else training
        self._subjects = None if subjects is None else subjects[self._rows]
        self._labels = _summable(labels[self._rows], self._num_classes)
        self._posterior = Posterior(plan.memory_bytes)
        self._targets: Tensor | None = None
        self._known_targets = known_targets
        self._is_known = torch.zeros(len(self._rows), dtype=torch.bool)
        if known_targets is not None:
            self._known_targets = known_targets[self._rows].cpu()
            lacks = self._known_targets.isnan().reshape(len(self._rows), -1).any(dim=1)
            self._is_known = ~lacks
            if not lacks.any():  # every label was released before: there is no stage
                self._use(self._known_targets)
                self._epochs = ()
                if releases:  # from which targets follow around what this run's model predicts
                    self._posterior.load_state_dict(releases, len(self._rows))
                    self._known_targets = None
        self._report = interface.DefenseReport(
            noise_power=0.0,  # the noise is in the sums: nothing is added to the gradient
            charge=interface.LeakCharge(0.0, adversary=Adversary.ANYBODY, is_gaussian=True),
        )

    def targets(self, batch: interface.LabelledRows, /) -> Tensor:
        if self._targets is None:
            raise ValueError("projected_labels has begun no stage: there are no targets")
        return self._targets[batch.rows]

    def defend(self, batch: interface.RawBatch) -> interface.Defended:
        """Return the values unchanged. The labels' values are checked but not used."""
        check_labels(batch.labels, as_rows(batch.gradients), self._num_classes)
        return interface.Defended(
            interface.DefendedGradient(batch.gradients.detach()), self._report
        )

    def charge_covering(self, _move: interface.LabelMove, /) -> interface.LeakCharge:
        """Return no charge: every gradient is a function of the sums, which are charged."""
        return self._report.charge

    def pending_release(self, epoch: int, facts: LabelFreeFacts, /) -> "StageRelease | None":
        """Return the release due before an epoch's next answer; None if none is.

        Epochs count from 0. Raises ValueError if the facts are not of a kind that can be summed.
        """
        stage = self._next_stage
        if stage == len(self._epochs) or epoch < self._epochs[stage]:
            self._follow(epoch, facts)
            return None
        predictions = self._predictions(facts)  # before any label is summed
        rows = design(
            facts,
            len(self._rows),
            max(1, self._plan.rank // (stage + 1)),  # as the share of mu^2: sums of equal precision
            subjects=self._subjects,
            excluded=self._is_known,
            earlier=self._posterior.released,
        )
        return StageRelease(self, stage, rows, predictions)

    def _follow(self, epoch: int, facts: LabelFreeFacts) -> None:
        """Make an epoch's targets anew from the same sums, around what the model predicts now.

        Measured, this is worth .001 to .006 of test AUC; it needs no label, and so reveals nothing.
        """
        if self._posterior.num_stages and epoch > self._followed:
            self._use_posterior(self._predictions(facts))
            self._followed = epoch

    def _predictions(self, facts: LabelFreeFacts) -> Tensor:
        link = shares_of if self._num_classes == ONE_NUMBER else _probabilities
        predictions = torch.cat([link(outputs.cpu()) for outputs in facts.logits()])
        if not bool(predictions.isfinite().all()):
            raise ValueError("the top model predicts something that is not a number")
        return predictions

    def sigma_of(self, stage: int) -> float:
        """Return the standard deviation of the noise in each sum of a stage."""
        share = stage_shares(len(self._epochs))[stage]
        return stage_sigma(self._plan.mu, share, self._num_classes)

    def charge_of(self, stage: int) -> interface.LeakCharge:
        """Return the charge of a stage: the first pays for all.

        A peer that sees a stage's release and then decides whether to leave makes the runs in which
        it leaves reveal more than their stages do. No such choice makes all runs together reveal
        more than the plan.
        """
        sum_kl = 0.0 if stage else self._plan.mu**2
        return interface.LeakCharge(sum_kl, adversary=Adversary.ANYBODY, is_gaussian=True)

    def draw(self, stage: int, rows: Design, key: bytes) -> Release:
        """Compute the noisy sums of a stage's design."""
        return draw_release(rows, self._labels, self.sigma_of(stage), SecureNoise(lambda: key))

    def begin(self, stage: int, rows: Design, release: Release, predictions: Tensor) -> None:
        """Begin a stage: make its targets from all sums so far."""
        self._posterior.add(rows, release)
        self._use_posterior(predictions)
        self._next_stage = stage + 1
        self._followed = self._epochs[stage]

    def _use_posterior(self, predictions: Tensor) -> None:
        targets = self._posterior.targets(predictions)
        if self._known_targets is not None:
            targets[self._is_known] = self._known_targets[self._is_known]
        self._use(targets)

    def _use(self, targets: Tensor) -> None:
        every = torch.zeros(len(self._examples.labels), *targets.shape[1:])
        every[self._rows] = targets.float()
        self._targets = every.to(self._examples.device)

    @property
    def released_rows(self) -> Tensor:
        """Positions of the training rows that no earlier run has released, (rows,)."""
        return self._rows[~self._is_known]

    @property
    def released_targets(self) -> Tensor | None:
        """Targets of all aligned rows, zero for rows that are not trained on; None before any."""
        return self._targets

    @property
    def releases(self) -> Mapping[str, Tensor]:
        """What ``Examples.known_releases`` is to be in a later run on the same training rows.

        Empty if it does not cover them.
        """
        if self._known_targets is not None or not self._posterior.num_stages:
            return {}
        return self._posterior.state_dict()

    @property
    def immutable(self) -> Mapping[str, str]:
        """Names of large parts of the state, by their key in it: a name stands for one value."""
        count = self._posterior.num_stages
        first = self._next_stage - count
        return {f"posterior.steps.{n}": f"design{first + n}" for n in range(count)}

    def state_dict(self) -> dict[str, Tensor]:
        state = {
            "next_stage": torch.tensor(self._next_stage),
            "followed": torch.tensor(self._followed),
        }
        if self._targets is not None:
            state["targets"] = self._targets
        return state | {f"posterior.{name}": v for name, v in self._posterior.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not {"next_stage", "followed"} <= set(state):
            raise ValueError(f"expected the state of projected_labels, got {sorted(state)}")
        self._next_stage = int(state["next_stage"])
        self._followed = int(state["followed"])
        targets = state.get("targets")
        self._targets = None if targets is None else targets.to(self._examples.device)
        prefix = "posterior."
        self._posterior.load_state_dict(
            {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
        )


class StageRelease:
    """The release with which a stage of projected labels begins, due and not drawn yet.

    It is drawn once, logged and charged, and only then used. ``charge`` is of each training row,
    and ``design`` the digest of everything, except labels and noise, on which the release depends.
    The predictions are those of the model for the training rows, which no label has entered.
    """

    def __init__(
        self, defense: ProjectedLabels, stage: int, rows: Design, predictions: Tensor
    ) -> None:
        self.stage = stage
        self.charge = defense.charge_of(stage)
        self._defense = defense
        self._rows = rows
        self._predictions = predictions
        self.design = _digest(rows, defense.sigma_of(stage))

    def draw(self, key: bytes) -> Mapping[str, Tensor]:
        """Compute the noisy sums, (rank,) or (rank, classes) float64, and their noise's size.

        The noise follows from the key, 32 secret bytes.
        """
        sums, sigma = self._defense.draw(self.stage, self._rows, key)
        return {"sums": sums, "sigma": torch.tensor(sigma, dtype=torch.float64)}

    def use(self, release: Mapping[str, Tensor]) -> None:
        """Begin the stage with a release, drawn now or earlier; ValueError for other shapes."""
        sums, sigma = release.get("sums"), release.get("sigma")
        if sums is None or sigma is None or len(sums) != self._rows.rank:
            raise ValueError(f"expected {self._rows.rank} sums and their sigma")
        taken = Release(sums, float(sigma))
        self._defense.begin(self.stage, self._rows, taken, self._predictions)


def _digest(rows: Design, sigma: float) -> bytes:
    hashed = hashlib.blake2b(rows.steps.contiguous().numpy().data, digest_size=32)
    hashed.update(f"{rows.steps.shape} {rows.unit!r} {sigma!r}".encode())
    return hashed.digest()


def _summable(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels as they are summed, float64 on the CPU.

    Those of two classes are left as they are, those of several become one-hot rows, and numbers are
    rounded to a grid.
    """
    labels = labels.detach().cpu()
    if num_classes == ONE_NUMBER:
        return on_label_grid(labels)
    return labels.double() if num_classes == 2 else one_hot(labels.long(), num_classes).double()


def _probabilities(logits: Tensor) -> Tensor:
    return torch.sigmoid(logits) if logits.ndim == 1 else torch.softmax(logits, dim=1)
