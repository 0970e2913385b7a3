"""Model completion in whole runs: what both parties record of it, and the malicious optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from splitveil.common.privacy.attacks import FINAL_ATTACKS
from tests.support.recorded import recorders
from tests.support.runs import Parties, build_parties, run_in_process, write_example

ALL = f"attacks: [norm, {', '.join(FINAL_ATTACKS)}], queue_batches: 512, max_cpu_share: null"
LABELS = "labels: {source: {kind: csv, path: active.csv}, id_column: id, label_column: label}"
LONG = ["contract.epochs=12", "optimizer.learning_rate=0.01"]


def recorded(folder: Path, *adversary: str) -> tuple[Parties, list[dict[str, Any]]]:
    """Run both parties, and return them and the run-level leak that each has recorded."""
    write_example(folder, rows=900)
    parties = build_parties(
        folder,
        [*LONG, "insecure_nonce_seed=1", f"leak_monitor={{{ALL}}}"],
        [
            *LONG,
            "insecure_nonce_seed=2",
            f"adversary={{{ALL}, {LABELS}{''.join(f', {one}' for one in adversary)}}}",
        ],
    )
    with recorders(parties, folder) as both:
        run_in_process(parties)
    summaries = both.active.summary({}).form(), both.passive.summary().form()
    return parties, [summary["leak_run_level"]["cut"] for summary in summaries]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Parties, list[dict[str, Any]]]:
    return recorded(tmp_path_factory.mktemp("passive"))


def test_forty_labels_and_the_trained_half_reveal_the_others(
    run: tuple[Parties, list[dict[str, Any]]],
) -> None:
    """Nearly as much as this party's features can: the other one's are as large a part."""
    _, (active, _) = run
    figures = active["completion_40"]
    assert figures["low"] > 0.8
    assert figures["auc"] > active["final_nearest_hint"]["auc"]


def test_the_malicious_optimizer_trains_another_bottom_model(
    run: tuple[Parties, list[dict[str, Any]]], tmp_path: Path
) -> None:
    honest, _ = run
    malicious, (active, passive) = recorded(tmp_path, "amplify: true")
    first, second = honest.run.trainer, malicious.run.trainer
    assert first is not None
    assert second is not None
    weights = [torch.cat([p.flatten() for p in one.model.parameters()]) for one in (first, second)]
    assert not torch.allclose(weights[0], weights[1])
    assert active["completion_40"]["low"] > 0.8
    assert active.keys() == passive.keys()
