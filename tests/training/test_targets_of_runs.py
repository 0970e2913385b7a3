"""Whole runs on targets that depend on predictions: ALIBI and the posterior of Gaussian noise."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.text.upper_bounds import at_most
from tests.support.plans import printed_plan
from tests.support.runs import build_parties, run_in_process

MECHANISMS = {
    "alibi": "{kind: alibi, epsilon: 2}",
    "gaussian": "{kind: gaussian, noise_ratio: 1, posterior: model}",
}


def defense(name: str) -> str:
    mechanism = MECHANISMS[name]
    return f"defense={{name: noisy_label, mechanism: {mechanism}, insecure_noise_seed: 7}}"


LEDGER: dict[str, tuple[float, float | None]] = {
    "alibi": (4 * (1 + math.expm1(-1)), 2.0),
    "gaussian": (1.0, None),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_ledger_charges_a_draw_once_over_all_epochs(example: Path, name: str) -> None:
    parties = build_parties(example, [defense(name), "contract.epochs=3"], ["contract.epochs=3"])
    run_in_process(parties)
    bounds = parties.session.leak_bounds()
    sum_kl, epsilon = LEDGER[name]
    assert bounds.sum_kl.max == pytest.approx(sum_kl)
    assert bounds.epsilon == epsilon


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_plan_says_exactly_what_the_ledger_will(example: Path, name: str) -> None:
    more = [defense(name), "contract.epochs=3"]
    plan = printed_plan(example, *more)
    assert "Exact, whatever the gradients." in plan
    assert f" {at_most(LEDGER[name][0])} " in plan


def test_the_top_model_is_asked_once_more_only_where_targets_depend_on_it(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes through the top model, with and without a posterior; one more per training step."""
    passes = []
    for mechanism in ("{kind: gaussian}", "{kind: gaussian, posterior: model}"):
        count = 0

        def counting(
            self: TopTrainer, *given: Tensor, real: Callable[..., Tensor] = TopTrainer._logits
        ) -> Tensor:
            nonlocal count
            count += 1
            return real(self, *given)

        with monkeypatch.context() as patched:
            patched.setattr(TopTrainer, "_logits", counting)
            labels = (
                f"defense={{name: noisy_label, insecure_noise_seed: 7, mechanism: {mechanism}}}"
            )
            parties = build_parties(example, [labels])
            run_in_process(parties)
        passes.append(count)
    assert passes[1] - passes[0] == len(parties.active.losses)
