"""Attacks on stored rows, on a small split model whose activations tell nothing, or everything."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil.attacks import ON_STORED_ROWS
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.stored_row_attacks import Received, lea, surrogate
from splitveil.library.auditing import audit

EXAMPLES, BATCH, EPOCHS, WIDTH = 500, 100, 3, 8


def true_labels(num_classes: int) -> Tensor:
    draws = torch.rand(EXAMPLES, generator=torch.Generator().manual_seed(0))
    return (draws * num_classes).long() if num_classes > 2 else (draws < 0.3).long()


def received(labels: Tensor, centres: Tensor | float = 0.0) -> tuple[Received, nn.Module]:
    """Train a top model on activations around centres, and return what was sent back.

    Its first weights are returned as well.
    """
    generator = torch.Generator().manual_seed(1)
    activations = centres + torch.randn(EXAMPLES, WIDTH, generator=generator)
    top, first = (surrogate(WIDTH, int(labels.max()) + 1, seed=2) for _ in range(2))
    optimizer = torch.optim.Adam(top.parameters(), lr=0.01)
    sent, positions = [], []
    for _ in range(EPOCHS):
        for rows in torch.randperm(EXAMPLES, generator=generator).reshape(-1, BATCH):
            inputs = activations[rows].requires_grad_()
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(top(inputs), labels[rows]))
            assert inputs.grad is not None
            optimizer.step()
            sent.append(inputs.grad)
            positions.append(rows)
    order = torch.cat(positions)
    starts = np.arange(0, len(order) + 1, BATCH)
    return Received(torch.cat(sent), activations[order], order, starts), first


@pytest.mark.parametrize("num_classes", [2, 3])
def test_stored_gradients_reveal_labels_that_activations_do_not(num_classes: int) -> None:
    """And nothing of labels that the gradients do not carry."""
    labels = true_labels(num_classes)
    rows, _ = received(labels)

    def measured(of: Tensor) -> dict[str, float]:
        audited = audit(
            rows.gradients, of[rows.positions], batches=BATCH, examples=rows.positions,
            activations=rows.activations, attacks=tuple(ON_STORED_ROWS),
        )  # fmt: skip
        if num_classes == 2:  # known labels are not scored
            assert audited.run["gramssat_5"]["examples"] == EXAMPLES - 10
        return {name: leak["auc"] for name, leak in audited.run.items()}

    leaks = measured(labels)
    assert leaks.pop("lea") < 0.65
    if num_classes == 2:  # the slope of one logit depends on the activation
        assert leaks.pop("gradient_clusters") > 0.65
    assert min(leaks.values()) > 0.95, leaks
    others = labels[torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(3))]
    leaks = measured(others)
    assert max(leaks.values()) < 0.65, leaks  # standard deviation of each pair: .03


def test_clusters_of_activations_are_named_by_the_first_gradients() -> None:
    """With the top model's first weights: the names are those of the gradients."""
    groups = true_labels(3)
    centres = 6 * torch.eye(3, WIDTH)[groups]
    for names in ([0, 1, 2], [2, 0, 1]):
        labels = torch.tensor(names)[groups]
        rows, top = received(labels, centres)
        leaks = lea(rows, top, 3).argmax(dim=1)
        assert float((leaks == labels).float().mean()) > 0.98


@pytest.mark.parametrize("attack", [*ON_STORED_ROWS])
def test_classes_may_have_no_example_and_examples_may_be_few(attack: str) -> None:
    rows, _ = received(true_labels(2))
    for number in (1, 2, BATCH):
        few = slice(number)
        positions, labels = rows.positions[few], 2 * true_labels(2)[rows.positions[few]]
        audited = audit(
            rows.gradients[few], labels, examples=positions,
            activations=rows.activations[few], attacks=[attack],
        )  # fmt: skip
        assert all(0 <= leak["auc"] <= 1 for leak in audited.run.values())


def test_attacks_on_stored_rows_need_examples_and_activations() -> None:
    with pytest.raises(SettingsError, match="exploit needs more"):
        audit(torch.ones(4, 2), [0, 1, 0, 1], activations=torch.ones(4, 2), attacks=["exploit"])
