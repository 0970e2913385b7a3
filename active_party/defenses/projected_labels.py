"""Projected labels: noisy sums over all labels are told once per stage, and nothing else ever is.

What a model needs from the labels are their sums against a few dozen functions of the features.
Flipping one label moves such a sum over N rows by 1 at most, so noise that covers that 1 costs the
model little, and less with every row. In each stage, design A (N, rank), sums and targets are

    t = A^T y + sigma z,    |A_i| <= 1,    sigma = D sqrt(stages) / mu,    z standard normal
    y^ = posterior mean of y given all sums so far, around the model's prediction

with D = 1 for two classes and sqrt 2 for several, where a label is one-hot and a flip moves two
entries. Both halves of the network train on y^ instead of y: gradients are (p - y^) J, and p, J and
the next stage's design are functions of activations and of earlier sums. So everything that the
peer ever sees is post-processing of the sums, and each label is mu-Gaussian-differentially private
over the whole run: no score of any peer, whatever it sends and whatever it knows besides this one
label, tells the label with an AUC above Phi(mu / sqrt 2).

This is the Gaussian mechanism on linear queries chosen without labels (Li et al., PODS 2010; Dong,
Roth and Su, JRSS B 2022, corollary 3.3 for the composition), in the space of examples, which split
learning allows because the active party sees every activation; LabelDP-Pro (Ghazi et al., ICLR
2024) projects gradients in a similar way. The mathematics stands in the package `projection`.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, Tag
from torch import Tensor
from torch.nn.functional import one_hot

from splitveil.active_party.defenses.forecast import ChargeForecast, Forecast
from splitveil.active_party.defenses.gaussian_dp import (
    leak_auc_of_mu,
    mu_of_epsilon_delta,
    mu_of_leak_auc,
)
from splitveil.active_party.defenses.interface import (
    Covers,
    Defended,
    DefendedGradient,
    Defense,
    DefenseReport,
    LabelledRows,
    LabelMove,
    LeakCharge,
    PendingRelease,
    RawBatch,
)
from splitveil.active_party.defenses.noise import SecureNoise
from splitveil.active_party.defenses.projection.design import Design, design, stage_sigma
from splitveil.active_party.defenses.projection.features import Chunks
from splitveil.active_party.defenses.projection.posterior import Posterior
from splitveil.active_party.defenses.projection.release import Release, draw_release
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.active_party.defenses.section import BuildInputs, DefenseContext, SeededDefense
from splitveil.common.settings import Section, kind_by_key

MIB = 2**20


class LeakAucStrength(Section):
    """Strength given as the largest AUC of any score."""

    leak_auc: float = Field(gt=0.5, lt=1)
    """AUC over the whole run that no score of any peer exceeds; 0.5 is guessing."""

    @property
    def of_run(self) -> float:
        """The run's mu."""
        return mu_of_leak_auc(self.leak_auc)


class MuStrength(Section):
    """Strength given as Gaussian differential privacy."""

    mu: float = Field(gt=0, le=100)
    """Each label is mu-Gaussian-differentially private over the whole run."""

    @property
    def of_run(self) -> float:
        """The run's mu."""
        return self.mu


class EpsilonDeltaStrength(Section):
    """Strength given as label differential privacy."""

    epsilon: float = Field(gt=0, le=100)
    """Each label is (epsilon, delta)-differentially private over the whole run."""

    delta: float = Field(default=1e-6, gt=1e-100, lt=1)
    """See ``epsilon``."""

    @property
    def of_run(self) -> float:
        """The run's mu."""
        return mu_of_epsilon_delta(self.epsilon, self.delta)


Strength = Annotated[
    Annotated[LeakAucStrength, Tag("leak_auc")]
    | Annotated[MuStrength, Tag("mu")]
    | Annotated[EpsilonDeltaStrength, Tag("epsilon")],
    kind_by_key("leak_auc", "mu", "epsilon", error_type="projected_strength_key"),
]
"""The bound for the whole run; the key that is present names the unit, and conversions are exact.
"""


class ProjectedLabelsDefense(SeededDefense):
    """Tell noisy sums over all labels, and train both halves on what they say of each label.

    The guarantee holds for each label against everybody, whatever the peer sends and knows. The
    price falls with the number of training rows.
    """

    name: Literal["projected_labels"] = "projected_labels"

    strength: Strength = LeakAucStrength(leak_auc=0.6)
    """The bound for the whole run: ``leak_auc``, ``mu``, or ``epsilon`` and ``delta``."""

    stages: int = Field(default=15, ge=1, le=10_000)
    """Number of times that sums are told, at equal distances over the epochs; no more than there
    are epochs. More stages follow the model more closely, and put more noise on each."""

    rank: int = Field(default=64, ge=1, le=1024)
    """Number of sums in each stage: directions of the activations, the own features and the top
    model in which labels are told."""

    memory: int = Field(default=256, ge=1, le=1_000_000)
    """MiB for the weights of earlier stages, which are combined with the newest; the oldest are
    forgotten first."""

    refit_top: bool = True
    """Whether to fit a copy of the top model to the true labels after the last gradient, for this
    party's own predictions. The model without it is kept as well, and only that one may begin a
    later run."""

    subject_column: str | None = None
    """Column of this party's file that names the person whom a row is about; rows of one person
    then share one bound. ``null`` if each row has a person of its own."""

    @property
    def needs_survey(self) -> bool:
        """Whether a run has to begin with a survey: always."""
        return True

    @property
    def model_is_label_free(self) -> bool:
        """Whether the trained model depends on labels only through the sums: always."""
        return True

    @property
    def holds_for_anybody(self) -> bool:
        """Whether nothing else that the peer sees may depend on true labels: always."""
        return True

    @property
    def refits_top(self) -> bool:
        """Whether the top model is fitted to the true labels at the end."""
        return self.refit_top

    def charge(self, context: DefenseContext) -> LeakCharge:
        """Return the charge of one stage."""
        mu = self.strength.of_run
        sum_kl = mu**2 / len(stage_epochs(self.stages, context.epochs))
        return LeakCharge(sum_kl, covers=Covers.ANYBODY, is_gaussian=True)

    def _build(self, given: BuildInputs, /) -> Defense:
        return ProjectedLabels(self, given)

    def forecast(self, context: DefenseContext) -> Forecast:  # noqa: ARG002
        """Return the charge of all stages together, which the strength determines."""
        mu = self.strength.of_run
        honesty = (
            f"Exact, whatever the activations: each label is {mu:.3g}-Gaussian-differentially "
            f"private over the whole run, so no score of any peer exceeds AUC "
            f"{leak_auc_of_mu(mu):.3f}."
        )
        return Forecast({"persistent": ChargeForecast.exactly(mu**2)}, "persistent", honesty)

    def guarantee_limit(self) -> str:
        """Return an empty text: the guarantee holds for every peer."""
        return ""

    def composition_refusal(self) -> str | None:
        """Explain why another loss cannot train on targets."""
        return "projected_labels trains on targets of a cross entropy, which this is not"


def stage_epochs(stages: int, epochs: int) -> tuple[int, ...]:
    """Return the epochs at which stages begin, ascending: at equal distances, at most one each."""
    count = min(stages, epochs)
    return tuple(number * epochs // count for number in range(count))


class ProjectedLabels(Defense):
    """Releases gradients of targets unchanged; only the sums from which targets come are charged.

    Args:
        settings: strength, stages and rank.
        given: facts about the run and its rows; a defense built without examples has no targets.
    """

    def __init__(self, settings: ProjectedLabelsDefense, given: BuildInputs) -> None:
        self._settings = settings
        self._context = given.context
        self._epochs = stage_epochs(settings.stages, given.context.epochs)
        self._next_stage = 0
        self._examples = given.examples
        self._posterior: Posterior | None = None
        self._targets: Tensor | None = None
        if given.examples is not None:
            labels, num_classes = given.examples.labels, given.context.num_classes
            training = given.examples.training
            self._rows = torch.arange(len(labels)) if training is None else training
            self._labels = _one_hot(labels[self._rows], num_classes)
            self._posterior = Posterior(settings.memory * MIB)
        mu = settings.strength.of_run
        self._report = DefenseReport(
            noise_power=0.0,  # the noise is in the sums: nothing is added to the gradient
            sum_kl_after=mu**2,
            leak_auc_bound=leak_auc_of_mu(mu),
            charge=LeakCharge(0.0, covers=Covers.ANYBODY, is_gaussian=True),
        )

    def targets(self, batch: LabelledRows, /) -> Tensor:
        """Return the present stage's targets of a batch, (batch,), or (batch, classes).

        Raises:
            ValueError: no stage has begun.
        """
        if self._targets is None:
            raise ValueError("projected_labels has begun no stage: there are no targets")
        return self._targets[batch.rows]

    def defend(self, batch: RawBatch) -> Defended:
        """Return the values unchanged. The labels' values are checked but not used."""
        as_classes(batch.labels, as_rows(batch.gradients), self._context.num_classes)
        return Defended(DefendedGradient(batch.gradients.detach()), self._report)

    def charge_covering(self, _move: LabelMove, /) -> LeakCharge:
        """Return no charge: every gradient is a function of the sums, which are charged."""
        return self._report.charge

    def pending_release(self, epoch: int, chunks: Chunks, /) -> PendingRelease | None:
        """Return the release of a stage that begins with this epoch, unless it has begun.

        Raises:
            ValueError: the predictions are not finite.
        """
        stage = self._next_stage
        if stage == len(self._epochs) or epoch < self._epochs[stage]:
            return None
        predictions = torch.cat([_probabilities(chunk.logits) for chunk in chunks()])
        if not bool(predictions.isfinite().all()):  # before anything is told of the labels
            raise ValueError("the top model predicts something that is not a number")
        rows = design(chunks, len(self._rows), self._settings.rank)
        return StageRelease(self, stage, rows, predictions)

    @property
    def stage_sigma(self) -> float:
        """Standard deviation of the noise in each sum."""
        mu, stages = self._settings.strength.of_run, len(self._epochs)
        return stage_sigma(mu, stages, self._context.num_classes)

    @property
    def stage_charge(self) -> LeakCharge:
        """The charge of one stage."""
        return self._settings.charge(self._context)

    def draw(self, rows: Design, key: bytes) -> Release:
        """Compute the noisy sums of a design."""
        return draw_release(rows, self._labels, self.stage_sigma, SecureNoise(lambda: key))

    def begin(self, stage: int, rows: Design, release: Release, predictions: Tensor) -> None:
        """Begin a stage: make its targets from all sums so far.

        Raises:
            ValueError: the release has another shape than the design.
        """
        if self._posterior is None or self._examples is None:
            raise ValueError("projected_labels was built without examples")
        self._posterior.add(rows, release)
        targets = self._posterior.targets(predictions)
        every = torch.zeros(len(self._examples.labels), *targets.shape[1:])
        every[self._rows] = targets.float()
        self._targets = every.to(self._examples.device)
        self._next_stage = stage + 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the targets, and what later stages need of the earlier ones."""
        state = {"next_stage": torch.tensor(self._next_stage)}
        if self._targets is not None:
            state["targets"] = self._targets
        if self._posterior is not None:
            state |= {f"posterior.{name}": v for name, v in self._posterior.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state that ``state_dict`` returned.

        Raises:
            ValueError: the state belongs to another defense.
        """
        if "next_stage" not in state:
            raise ValueError(f"expected the state of projected_labels, got {sorted(state)}")
        self._next_stage = int(state["next_stage"])
        targets = state.get("targets")
        device = None if self._examples is None else self._examples.device
        self._targets = None if targets is None else targets.to(device)
        if self._posterior is not None:
            prefix = "posterior."
            self._posterior.load_state_dict(
                {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
            )


class StageRelease(PendingRelease):
    """The release with which a stage of projected labels begins.

    Args:
        defense: the defense whose stage it is.
        stage: number of the stage.
        rows: the weights of the training rows.
        predictions: of the model for the training rows, which no label has entered.
    """

    def __init__(
        self, defense: ProjectedLabels, stage: int, rows: Design, predictions: Tensor
    ) -> None:
        self.stage = stage
        self.charge = defense.stage_charge
        self._defense = defense
        self._rows = rows
        self._predictions = predictions
        self.design = _digest(rows, defense.stage_sigma)

    def draw(self, key: bytes) -> Mapping[str, Tensor]:
        """Compute the noisy sums, (rank,) or (rank, classes) float64, and their noise's size."""
        sums, sigma = self._defense.draw(self._rows, key)
        return {"sums": sums, "sigma": torch.tensor(sigma, dtype=torch.float64)}

    def use(self, release: Mapping[str, Tensor]) -> None:
        """Make the stage's targets.

        Raises:
            ValueError: the release has other parts or shapes.
        """
        sums, sigma = release.get("sums"), release.get("sigma")
        if sums is None or sigma is None or len(sums) != self._rows.rank:
            raise ValueError(f"expected {self._rows.rank} sums and their sigma")
        taken = Release(sums, float(sigma))
        self._defense.begin(self.stage, self._rows, taken, self._predictions)


def _digest(rows: Design, sigma: float) -> bytes:
    hashed = hashlib.blake2b(rows.steps.contiguous().numpy().data, digest_size=32)
    hashed.update(f"{rows.steps.shape} {rows.unit!r} {sigma!r}".encode())
    return hashed.digest()


def _one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return labels of two classes as they are, and of several as one-hot rows, on the CPU."""
    labels = labels.detach().cpu()
    return labels.double() if num_classes == 2 else one_hot(labels.long(), num_classes).double()


def _probabilities(logits: Tensor) -> Tensor:
    logits = logits.cpu()
    return torch.sigmoid(logits) if logits.ndim == 1 else torch.softmax(logits, dim=1)
