"""Which weights in the loss a defense can be used with.

A defended gradient is that of w_i c_y times the loss of row i: w_i is the row's own weight, and c_y
the weight of its class.

- Class weights c are fixed numbers. They multiply the loss of each label. A defense that replaces
  labels by targets multiplies by the targets' shares of the labels, never by those of the true
  label: weights and gradient stay a function of what was released, and every bound holds as before.
  A defense that adds noise to gradients measures the weighted ones. Persistent noise does not
  measure: it is made for a label that moves a residual by 1, which with class weights it does not.
- Row weights w stand in the gradient of every defense, as they are: the peer reads them off the
  gradients' lengths. Weights that depend on the label would tell it, whatever replaces the label in
  the loss. Charges that are measured from class means see that; all others need weights that were
  chosen without a look at labels.
"""

from typing import NamedTuple

from splitveil.active_party.defenses.section import DefenseSection
from splitveil.common.privacy.covers import Covers


class WeightUses(NamedTuple):
    """The weights that a run's loss has."""

    of_classes: bool = False
    of_rows: bool = False
    are_label_free: bool = False
    """Whether the rows' weights were chosen without a look at labels."""


def refusal_of_weights(defense: DefenseSection, uses: WeightUses) -> str | None:
    """Explain why a defense cannot be used with such weights; None if it can."""
    if (uses.of_classes or uses.of_rows) and not defense.takes_weights:
        return (
            f"{defense.title} has a loss of its own, which knows no weights: leave out "
            f"data.class_weights and data.weight_column"
        )
    if uses.of_classes and defense.needs_slopes:
        return (
            f"persistent noise of {defense.title} is measured by what a label moves in a loss "
            f"without class weights: leave out data.class_weights, or set noise: fresh"
        )
    is_measured = defense.coverage().covers is Covers.CLASS_MEANS
    if uses.of_rows and not (uses.are_label_free or is_measured):
        return (
            f"the peer reads data.weight_column off the gradients, so that weights that depend on "
            f"labels would tell them beside the bound of {defense.title}: set "
            f"data.weights_are_label_free if no label was looked at to choose them"
        )
    return None
