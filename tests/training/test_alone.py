"""The model of the active party's own features alone."""

import pytest
import torch
from torch import nn

from splitveil.active_party.training.own_models import (
    Fitting,
    KnownRows,
    build_alone,
    predictions_alone,
    train_alone,
)
from splitveil.active_party.training.predictions import LossWeights
from splitveil.common.data.features import FeatureEncoder, Features, NumericScaler
from splitveil.common.privacy.leakage import auc

ENCODER = FeatureEncoder(
    signed_log1p=False,
    numeric=tuple(NumericScaler(name=f"x{j}", shift=0.0, scale=1.0) for j in range(3)),
    categorical=(),
    image=None,
)


def rows(num_classes: int = 2, count: int = 600, seed: int = 1) -> KnownRows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    if num_classes == 2:
        return KnownRows((x[:, 0] > 0.3).float(), Features(x))
    return KnownRows(x.argmax(dim=1).float(), Features(x))


def features_of(own: KnownRows) -> Features:
    assert own.features is not None
    return own.features


def trained(own: KnownRows, num_classes: int = 2) -> nn.Module:
    return train_alone(
        build_alone(ENCODER, num_classes, seed=3),
        own,
        torch.arange(0, len(own.labels), 2),
        Fitting(lambda model: torch.optim.Adam(model.parameters(), lr=0.01), 32, seed=4),
    )


def test_it_embeds_numbers_where_the_joint_model_does() -> None:
    binned = ENCODER.model_copy(update={"bins": ((0.0, 1.0),) * 3})
    embeds = ["numbers" in str(build_alone(own, 2, seed=3)) for own in (ENCODER, binned)]
    assert embeds == [False, True]


@pytest.mark.parametrize("num_classes", [2, 3])
def test_it_learns_what_the_features_say_of_rows_that_it_has_not_seen(num_classes: int) -> None:
    own = rows(num_classes)
    held_out = torch.arange(1, len(own.labels), 2)
    logits, labels = own.logits(trained(own, num_classes), held_out), own.labels[held_out]
    if num_classes == 2:
        assert auc(logits, labels) > 0.95
    else:
        assert float((logits.argmax(dim=1) == labels).float().mean()) > 0.85


def test_the_same_rows_and_seed_give_the_same_weights_and_disturb_no_random_numbers() -> None:
    own = rows()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    one, other = trained(own), trained(own)
    assert torch.equal(before, torch.get_rng_state())
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_labels_of_rows_outside_the_training_change_nothing() -> None:
    own = rows()
    labels = own.labels.clone()
    labels[1::2] = 1 - labels[1::2]
    for mine, theirs in zip(
        trained(own).parameters(), trained(own._replace(labels=labels)).parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def same_features(labels: torch.Tensor, weights: LossWeights) -> KnownRows:
    """Return rows whose features say nothing, so that the best prediction is a weighted share."""
    return KnownRows(labels, Features(torch.zeros(len(labels), 3)), weights=weights)


def test_rows_and_classes_count_in_it_what_they_count_in_the_joint_model() -> None:
    """Against the minimum of the weighted cross entropy, which is known in closed form."""
    labels = (torch.arange(2000) % 10 < 3).float()
    of_rows = torch.where(torch.arange(2000) % 20 < 10, 1.9, 0.1)
    of_rows[labels == 1] *= 2
    of_rows /= of_rows.mean()
    of_classes = torch.tensor([1.0, 4.0])
    found = {}
    for name, weights in {
        "plain": LossWeights(),
        "rows": LossWeights(of_rows),
        "classes": LossWeights(None, of_classes),
        "both": LossWeights(of_rows, of_classes),
    }.items():
        own = same_features(labels, weights)
        counted = torch.ones(2000) if weights.of_rows is None else weights.of_rows
        if weights.of_classes is not None:
            counted = counted * of_classes[labels.long()]
        training = torch.arange(0, 2000, 2)  # as ``trained`` chooses them
        share = float((counted * labels)[training].sum() / counted[training].sum())
        found[name] = float(predictions_alone(trained(own), features_of(own))[0])
        assert abs(found[name] - share) < 0.05, name
    assert found["rows"] - found["plain"] > 0.1
    assert found["classes"] - found["plain"] > 0.2
    assert found["both"] - found["classes"] > 0.08


def test_weights_of_three_classes_move_the_shares_to_theirs() -> None:
    labels = (torch.arange(3000) % 3).float()
    own = same_features(labels, LossWeights(None, torch.tensor([1.0, 2.0, 5.0])))
    found = predictions_alone(trained(own, 3), features_of(own))[0]
    assert found == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.05)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_probabilities_do_not_depend_on_other_rows(num_classes: int) -> None:
    own, model = rows(num_classes), build_alone(ENCODER, num_classes, seed=3)
    together = predictions_alone(model, features_of(own))
    assert together.shape == ((600,) if num_classes == 2 else (600, 3))
    for row in (0, 1, 311, 599):
        one = predictions_alone(model, features_of(own).rows(torch.tensor([row])))
        assert (one[0] == together[row]).all()
