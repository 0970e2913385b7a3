"""Whole runs in one process, with every attack on every gradient that the passive party receives.

Session, sample order, defense and tensors are the same as in a run over gRPC, which gives the same
bits (`tests/wire/test_service.py`). The audits run inline, so that they never leave a batch out.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.privacy.accumulation import combine_with_hints
from splitveil.common.privacy.attacks import ATTACKS, RUN_ATTACKS
from splitveil.common.privacy.audit import LeakAudit, LeakByAttack
from splitveil.common.privacy.figures import BatchFigures, LeakBounds, RunFigures
from splitveil.common.privacy.final_attacks import complete_model, one_against_rest, pick_labelled
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.leakage import auc
from splitveil.common.privacy.observation import Observation
from splitveil.common.run.course import AlignedRows, Batch
from tests.support import runs

BATCH_ATTACKS = tuple(ATTACKS)
STORE_SLOPES = "leak_monitor={attacks: [informed]}"
"""Override with which the active party's results hold the slopes of its predictions."""


class AttackedRun(NamedTuple):
    test_aucs: list[float]
    """After each epoch."""

    leak: Mapping[str, Mapping[str, BatchFigures]]
    """Layer -> attack -> leak AUCs of single batches."""

    worst_epoch: LeakByAttack
    run_level: Mapping[str, Mapping[str, RunFigures]]
    features_alone: dict[str, float]
    """AUC of a logistic regression on the passive party's own features, fitted to the labels that
    the combining attack of this name knows, or of model completion on features: what the attack
    could have had without any gradient."""

    random: list[tuple[int, float]]
    """Epoch and leak AUC of scores that know nothing, for each batch."""

    answer_bounds: list[float]
    """What no attack on this answer alone passes, by its charge; for each batch."""

    bounds: LeakBounds
    """The ledger's, at the end."""


StepListener = Callable[[Batch, Step, Tensor, Tensor], None]
"""Called with each batch, what the active party knows of it, and what the passive one sent and
received."""


def attacked_run(
    example: Path,
    active: Sequence[str],
    passive: Sequence[str] = (),
    attacks: Sequence[str] = (*BATCH_ATTACKS, *RUN_ATTACKS),
    on_step: StepListener | None = None,
) -> AttackedRun:
    """Train once and attack the cut layer and the passive party's first layer.

    At the cut layer the oracle's positive is a clean gradient. The first layer does not have clean
    gradients; there it follows from the received gradient. Without attacks, nothing is measured.
    """
    sender = Sender()
    red_team = _RedTeam(sender, attacks, on_step)
    # The monitor of a run in process is not observed; asking it makes results hold slopes.
    slopes = [STORE_SLOPES] if {"informed", "accumulated_informed"} & set(attacks) else []
    parties = runs.build_parties(
        example, [*active, *slopes], passive, active_seen=sender, passive_seen=red_team
    )
    runs.run_in_process(parties)
    red_team.audit.run.close_epoch()
    return AttackedRun(
        [e.figures.agreement for e in sender.evaluations if e.split == "test"],
        red_team.audit.summary(),
        red_team.audit.worst_epochs(),
        red_team.audit.run.result()[0],
        _features_alone(parties) if attacks else {},
        red_team.random,
        sender.answer_bounds,
        parties.session.leak_bounds(),
    )


def deal_labels(example: Path, folder: Path, seed: int) -> list[str]:
    """Write the example's labels to a file, permuted at random among its ids.

    Features then reveal nothing about a label, so that every leak comes from the gradients.

    Returns:
        Overrides with which the active party reads these labels and drops its own features.
    """
    settings = load_party_settings(ActiveSettings, example / "active.yaml", [])
    data = PartyData.load(settings.data, example)
    assert data.table.labels is not None
    dealt = np.random.default_rng(seed).permutation(data.table.labels).astype(int)
    path = folder / "dealt_labels.csv"
    lines = [f"{name},{label}" for name, label in zip(data.ids, dealt, strict=True)]
    path.write_text("\n".join(["id,label", *lines, ""]), encoding="utf-8")
    classes = f", classes: {settings.data.num_classes}" if settings.data.class_names else ""
    source = f"source: {{kind: csv, path: {path}}}"
    return [f"data={{{source}, id_column: id, label_column: label{classes}}}"]


def _features_alone(parties: runs.Parties) -> dict[str, float]:
    rows, bottom, top = (
        parties.active.rows,
        parties.run.trainer,
        parties.session.lifecycle.trainer,
    )
    assert rows is not None
    assert bottom is not None
    assert top is not None
    known = bottom.rows(rows.splits["train"]).numeric
    assert known is not None
    features, labels = known.double().numpy(), top.labels_of(rows.splits["train"]).long().numpy()
    found: dict[str, float] = {}
    for attack, over_run in RUN_ATTACKS.items():
        if not over_run.combines:
            continue
        # The generator of the run-level audit: the same examples are the hints.
        num_hints = over_run.num_hints
        combined = combine_with_hints(features, labels, num_hints, np.random.default_rng(0))
        if combined is not None:
            scores, others = combined
            found[attack] = auc(scores[others], labels[others])
    hints = pick_labelled(labels, 40, np.random.default_rng(0))
    if hints is not None:
        logits = complete_model(known, hints, 2, seed=0)
        others = np.delete(np.arange(len(labels)), hints.rows)
        found["completion_40"] = auc(one_against_rest(logits)[others, 1], labels[others])
    return found


class Sender(runs.ActiveRecording):
    """Remembers the last step, of which the red team is about to see the defended gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.answer_bounds: list[float] = []
        self.latest: Step | None = None

    def on_step(self, batch: Batch, result: Step) -> None:
        self.latest = result
        self.answer_bounds.append(leak_auc_bound(result.defended.charge.sum_kl))


class _RedTeam(runs.PassiveRecording):
    """Attacks the received gradients; labels and clean gradients come from the other party."""

    def __init__(
        self, sender: Sender, attacks: Sequence[str], on_step: StepListener | None
    ) -> None:
        super().__init__()
        self.audit = LeakAudit(attacks)
        self.random: list[tuple[int, float]] = []
        self._sender = sender
        self._attacks = attacks
        self._listener = on_step
        self._seed = b""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        self.audit = LeakAudit(self._attacks, num_examples=len(rows))
        self._seed = seed

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        known = self._sender.latest
        assert known is not None
        if self._listener is not None:
            self._listener(batch, known, sent, received)
        if not self._attacks:
            return
        gradients = {"cut": received, "first": layers["first"]}
        clean = gradients | {"cut": known.gradients}
        seen = Observation(
            batch.epoch,
            batch.step,
            gradients,
            known.labels,
            positions=torch.from_numpy(batch.positions.copy()),
            activations=sent,
            predictions=None
            if known.slopes is None
            else KnownPredictions(known.probabilities, known.slopes),
            references_are_clean=False,  # not at the first layer; a clean one loses nothing
        )
        clues = self.audit.clues(seen, self._seed, clean)
        measured = self.audit.observe(dataclasses.replace(seen, clues=clues))
        if measured is not None:
            self.random.append((batch.epoch, measured.random))
