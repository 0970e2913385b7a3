"""Runs on targets that depend on predictions."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from splitveil.active_party.training.top_trainer import TopTrainer
from tests.support.runs import build_parties, run_in_process


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
