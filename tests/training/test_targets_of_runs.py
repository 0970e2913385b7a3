"""Whole runs on targets that depend on predictions: ALIBI and the posterior of Gaussian noise."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.text.upper_bounds import at_most
from tests.support.equality import assert_same
from tests.support.peers import Lost, dying
from tests.support.plans import printed_plan
from tests.support.runs import Parties, build_parties, run_in_process

MECHANISMS = {
    "alibi": "{kind: alibi, epsilon: 2}",
    "gaussian": "{kind: gaussian, noise_ratio: 1, posterior: model}",
}
EVERY_2 = ["contract.checkpoints={every_steps: 2, keep: 100}"]


def defense(name: str) -> str:
    mechanism = MECHANISMS[name]
    return f"defense={{name: noisy_label, mechanism: {mechanism}, insecure_noise_seed: 7}}"


def parties_of(folder: Path, name: str, runs: Path | None = None, *more: str) -> Parties:
    both = [*EVERY_2, *(one for one in more if one.startswith("contract."))]
    return build_parties(folder, [*both, defense(name), *more], both, runs=runs)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_run_whose_parties_were_killed_ends_as_if_nothing_had_happened(
    example: Path, tmp_path: Path, name: str
) -> None:
    """Also with dropout, whose random numbers are part of a checkpoint."""
    top = "top_model={kind: mlp, hidden: [8], dropout: 0.2}"
    torch.manual_seed(1)
    whole = parties_of(example, name, None, top)
    run_in_process(whole)
    torch.manual_seed(1)
    first = parties_of(example, name, tmp_path, top)
    with pytest.raises(Lost):
        run_in_process(first, dying(5, after=True))
    second = parties_of(example, name, tmp_path, top)
    assert second.session.reopen()
    run_in_process(second)
    assert second.active.resumed != []
    assert_same(second, whole)


LEDGER: dict[str, tuple[float, float | None]] = {
    "alibi": (4 * (1 + math.expm1(-1)), 2.0),
    "gaussian": (1.0, None),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_ledger_charges_a_draw_once_over_all_epochs(example: Path, name: str) -> None:
    parties = parties_of(example, name, None, "contract.epochs=3")
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
