"""Projected labels: noisy sums over all labels are released once per stage, and nothing else is.

What a model needs from the labels are their sums against a few dozen functions of the features.
Flipping one label moves such a sum over N rows by 1 at most, so noise that covers that 1 costs the
model little, and less with every row. In each stage, design A (N, r), sums and targets are

    t = A^T y + sigma z,    |A_i| <= 1,    sigma = D / (mu sqrt(share)),    z standard normal
    y^ = posterior mean of y given all sums so far, around the model's prediction

with D = 1 for two classes and sqrt 2 for several, where a label is one-hot and a flip moves two
entries. Both halves of the network train on y^ instead of y: gradients are (p - y^) J, and p, J and
the next stage's design are functions of activations and of earlier sums. So everything that the
peer ever sees is post-processing of the sums, and each label is mu-Gaussian-differentially private
over the whole run: no score of any peer separates the labels with an AUC above Phi(mu / sqrt 2).
For labels that are numbers, as shares y of their range, D is 1 as well: any two values of one label
move the sums by |A_i| at most.

This is the Gaussian mechanism on linear queries chosen without labels (Li et al., PODS 2010; Dong,
Roth and Su, JRSS B 2022, corollary 3.3 for the composition), in the space of examples, which split
learning allows because the active party sees every activation; LabelDP-Pro (Ghazi et al., ICLR
2024) projects gradients in a similar way.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, Tag

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.dp_bounds import (
    leak_auc_of_mu,
    mu_of_epsilon_delta,
    mu_of_leak_auc,
)
from splitveil.active_party.defenses.forecast import Forecast, exactly
from splitveil.active_party.defenses.projected.label_utility import label_utility
from splitveil.active_party.defenses.projected.stages import (
    ProjectedLabels,
    StagePlan,
    stage_epochs,
)
from splitveil.active_party.defenses.section import Coverage, SeededDefense, Traits
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.settings import Mark, Section, kind_by_key
from splitveil.common.text.upper_bounds import at_most, auc_at_most

MIB = 2**20

PRICE = "docs/results.md"


class LeakAucStrength(Section):
    """Strength given as the largest AUC of any score."""

    leak_auc: float = Field(gt=0.5, lt=1)
    """AUC over the whole run that no score of any peer exceeds; 0.5 is guessing."""

    @property
    def of_run(self) -> float:
        return mu_of_leak_auc(self.leak_auc)


class MuStrength(Section):
    """Strength given as Gaussian differential privacy."""

    mu: float = Field(gt=0, le=100)
    """Each label is mu-Gaussian-differentially private over the whole run."""

    @property
    def of_run(self) -> float:
        return self.mu


class EpsilonDeltaStrength(Section):
    """Strength given as label differential privacy."""

    epsilon: float = Field(gt=0, le=100)
    """Each label is (epsilon, delta)-differentially private over the whole run."""

    delta: float = Field(default=1e-6, gt=1e-100, lt=1)
    """See ``epsilon``."""

    @property
    def of_run(self) -> float:
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
    """Release noisy sums over all labels, and train both halves on what they say of each label.

    The guarantee holds for each label against everybody, whatever the peer sends and knows. The
    price falls with the number of training rows.
    """

    name: Literal["projected_labels"] = "projected_labels"

    strength: Strength = LeakAucStrength(leak_auc=0.6)
    """The bound for the whole run: ``leak_auc``, ``mu``, or ``epsilon`` and ``delta``."""

    stages: int = Field(default=8, ge=1, le=10_000)
    """Number of times that sums are released, at most once in each epoch; with more epochs than
    stages, more often early than late. More stages follow the model more closely, and put more
    noise on each. The first takes the largest part of the bound, the second half as much, the third
    a third."""

    rank: int = Field(default=96, ge=1, le=1024)
    """Number of sums in the first stage: directions of the activations, the own features and the
    top model in which labels are summed. The second stage has half as many, the third a third, as
    their shares of the bound."""

    memory: int = Field(default=1024, ge=1, le=1_000_000)
    """MiB for the weights of earlier stages, which are combined with the newest; the oldest are
    forgotten first."""

    subject_column: str | None = None
    """Column of this party's file that names the person whom a row is about; rows of one person
    then share one bound, and one account over all runs that name it. ``null`` if each row has a
    person of its own."""

    earlier: Annotated[tuple[str, ...], Mark.PATH] = Field(default=(), max_length=1000)
    """Folders of earlier runs with this defense: the active party's ``checkpoint`` folder of each,
    written like ``initial_weights``. Rows whose id was in one of them keep the targets that they
    had at its end, and are charged nothing; only labels of new rows are summed. A run on just the
    training rows of the last folder makes its own targets from the sums of that run. Whether a
    label has changed since does not matter, because the choice of rows would reveal it. Refused
    unless the ledgers with which the run begins have all that those runs were charged. Needs
    ``data.id_column``."""

    if TYPE_CHECKING:  # those of an inner section, too

        def __init__(self, **settings: Any) -> None: ...

    @property
    def traits(self) -> Traits:
        said = "Everything that the peer receives is a function of features and of the noisy sums."
        return Traits(
            Coverage(Adversary.ANYBODY, said),
            takes_numbers=True,
            model_is_label_free=True,
            is_staged=True,
            subject_column=self.subject_column,
            earlier_targets=self.earlier,
        )

    def _build(self, given: interface.BuildInputs, /) -> interface.Defense:
        context = given.context
        plan = StagePlan(
            mu=self.strength.of_run,
            epochs=stage_epochs(self.stages, context.epochs),
            rank=self.rank,
            memory_bytes=self.memory * MIB,
        )
        return ProjectedLabels(plan, given)

    def forecast(self, context: interface.DefenseContext) -> Forecast:  # noqa: ARG002
        mu = self.strength.of_run
        honesty = (
            f"Exact, whatever the activations: each label is {at_most(mu)}-Gaussian-differentially "
            f"private over the whole run, so no score of any peer exceeds AUC "
            f"{auc_at_most(leak_auc_of_mu(mu))}."
        )
        charge = exactly(interface.LeakCharge(mu**2, adversary=Adversary.ANYBODY, is_gaussian=True))
        return Forecast({"persistent": charge}, "persistent", honesty)

    def utility_in_words(self, context: interface.DefenseContext, training_rows: int, /) -> str:
        share = 1 / context.num_classes if context.num_classes > 2 else context.pos_fraction
        if training_rows < 1 or not 0 < share < 1:
            return ""
        mu = self.strength.of_run
        utility = label_utility(training_rows, share, mu, self.rank, context.num_classes)
        half = utility.half_at_rows
        if context.is_number:
            of_positives = ""
        else:
            named = "positives" if context.num_classes == 2 else "of each class"
            of_positives = f" with {math.ceil(half * share):,} {named}"
        return (
            f"What is possible: at this bound {training_rows:,} training rows teach at most what "
            f"{utility.rows:,.0f} rows with unprotected labels would ({utility.share:.0%}). "
            f"Half of their worth is left at {half:,} rows{of_positives}; the price at other "
            f"sizes: {PRICE}."
        )

    def at_leak_auc(self, leak_auc: float, _context: interface.DefenseContext, /) -> Self:
        return self.model_copy(update={"strength": LeakAucStrength(leak_auc=leak_auc)})
