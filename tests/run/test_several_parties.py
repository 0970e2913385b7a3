"""Runs with several passive parties: their joint knowledge, and their waiting for each other."""

import statistics
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from splitveil.active_party.defenses import MarvellDefense, Step
from splitveil.active_party.defenses.marvell import PowerRatio
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.trainer_builder import TrainerBuilder as TopBuilder
from splitveil.common.alignment.exchange import Share
from splitveil.common.errors import (
    AlignmentError,
    NotOpen,
    OthersAwaited,
    OutOfStep,
    PeerError,
    PeerLeft,
)
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import Batch
from splitveil.common.run.messages import Answer, LeaveReason, Opening
from splitveil.passive_party.assembly import BottomBuilder
from tests.support import simulation
from tests.support.defenses import build_defense
from tests.support.peers import DiesAt, Lost
from tests.support.runs import (
    CPU,
    EVERY_2,
    MARVELL_2,
    NAMES,
    Parties,
    PartyPeer,
    build_parties,
    build_passive,
    finish,
    run_together,
    start,
    write_several,
)
from tests.support.simulation import ActiveRecording
from tests.support.waiting import HANGS_AFTER_S, wait_until

# ---- what they learn ----


def trained_whole(folder: Path, several: Parties, aggregation: str) -> dict[str, Tensor]:
    """Train the same models as one, with the same batches, without any protocol."""
    rows, settings = several.active.rows, several.active_settings
    assert rows is not None
    data = PartyData.load(settings.data, folder)
    top = TopBuilder(settings, data, CPU)(rows)
    bottoms = {}
    for name, party in several.peers.items():
        assert party.seen.rows is not None
        own = PartyData.load(party.settings.data, folder)
        bottoms[name] = BottomBuilder(party.settings, own, CPU)(party.seen.rows)
    optimizers = [build_optimizer(settings.optimizer, top.model)]
    optimizers += [
        build_optimizer(several.peers[name].settings.optimizer, bottom.model)
        for name, bottom in bottoms.items()
    ]
    for epoch in range(settings.contract.epochs):
        for positions in rows.order.epoch(epoch):
            cuts = [bottom.model(bottom.rows(positions)) for bottom in bottoms.values()]
            whole = torch.cat(cuts, dim=1)
            if aggregation != "concat":
                whole = torch.stack(cuts).sum(dim=0)
            if aggregation == "mean":
                whole = whole / len(cuts)
            logits = top.model(whole, top._own(torch.from_numpy(positions.copy())))
            loss = binary_cross_entropy_with_logits(logits, top.labels_of(positions))
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
    models = {"top": top.model} | {name: bottom.model for name, bottom in bottoms.items()}
    return {f"{n}.{k}": v for n, model in models.items() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("aggregation", ["mean", "sum", "concat"])
def test_the_parties_learn_what_one_model_of_all_would(three: Path, aggregation: str) -> None:
    both = [f"contract.aggregation={aggregation}"]
    several = build_parties(three, both, both)
    run_together(several)
    found, expected = several.weights(), trained_whole(three, several, aggregation)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.allclose(weight, expected[name], atol=1e-4), name
    other = {"mean": "sum", "sum": "mean", "concat": "concat"}[aggregation]
    if other != aggregation:
        wrong = trained_whole(three, several, other)
        assert not all(torch.allclose(found[name], wrong[name], atol=1e-4) for name in found)


def test_every_step_is_charged_once_for_all(three: Path) -> None:
    both = ["contract.aggregation=concat"]
    marvell = "defense={name: marvell, strength: {power_ratio: 4}, insecure_noise_seed: 7}"
    several = build_parties(three, [*both, marvell], both)
    run_together(several)
    _, bounds = several.active.ledger[-1]
    assert bounds.sum_kl.max == pytest.approx(2 * 0.25, rel=0.1)  # two epochs
    each = [party.seen.received for party in several.peers.values()]
    received = [torch.cat(parts, dim=1) for parts in zip(*each, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(received, several.active.sent, strict=True))


# ---- waiting for each other ----


class Held(PartyPeer):
    may_go: threading.Event
    _calls = 0

    def receive_gradient(self) -> Answer:
        self._calls += 1
        if self._calls == 3:
            self.may_go.wait(HANGS_AFTER_S)
        return super().receive_gradient()


def held() -> type[Held]:
    return type("HeldOnce", (Held,), {"may_go": threading.Event()})


def test_a_party_that_leaves_ends_the_run_of_all_by_name(three: Path) -> None:
    several, stuck = build_parties(three), held()
    threads = [start(several, "ash"), start(several, "birch", stuck), start(several, "cedar")]
    wait_until(lambda: len(several.active.losses) == 2)
    wait_until(lambda: set(several.session.lifecycle.stages.awaited()) == {"birch"})
    several.session.leave(several.session.run_id, LeaveReason.INTERRUPTED, "birch")
    stuck.may_go.set()
    finish(threads)
    assert "'birch' was stopped" in str(several.session.lifecycle.error)
    assert all(isinstance(error, PeerLeft) for error in several.errors.values())
    assert len(several.errors) == 3


# ---- going on ----


class Dies(DiesAt, PartyPeer):
    """Says nothing when it ends, whatever the reason."""

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """A killed process says nothing."""


SETTINGS = MarvellDefense(strength=PowerRatio(power_ratio=4.0), insecure_noise_seed=11)


def dying(at: int, *, after: bool) -> type[Dies]:
    return type("DiesOnce", (Dies,), {"at": at, "after": after})


def without_birch(
    folder: Path,
    runs: Path,
    at: int,
    *,
    after: bool,
    others: type[PartyPeer] = PartyPeer,
) -> tuple[Parties, list[threading.Thread]]:
    """Return a run in which birch was killed, and the threads of the others, which wait for it."""
    several = build_parties(folder, MARVELL_2, [EVERY_2], runs=runs)
    threads = [start(several, name, others) for name in ("ash", "cedar")]
    finish([start(several, "birch", dying(at, after=after))])
    assert isinstance(several.errors["birch"], Lost)
    return several, threads


def bring_back(several: Parties, folder: Path, runs: Path, threads: list[threading.Thread]) -> None:
    several.peers["birch"] = build_passive(folder, "birch", [EVERY_2], runs=runs)
    finish([start(several, "birch"), *threads])
    assert several.errors == {}


class Twice(PartyPeer):
    def handshake(self, *question: Any) -> Opening:
        first, again = super().handshake(*question), super().handshake(*question)
        assert again == first
        return again


def test_a_handshake_whose_answer_was_lost_does_not_take_parties_back_again(
    three: Path, tmp_path: Path
) -> None:
    several, threads = without_birch(three, tmp_path, 4, after=True, others=Twice)
    bring_back(several, three, tmp_path, threads)
    assert len(several.active.resumed) == 1


def test_before_the_first_answer_all_align_again(three: Path, tmp_path: Path) -> None:
    several, threads = without_birch(three, tmp_path, 1, after=False)
    first = several.session.run_id
    RunStore(tmp_path / "birch").forget()  # as if it had been killed before it was written
    bring_back(several, three, tmp_path, threads)
    assert several.session.stage is Stage.FINISHED
    assert several.session.run_id != first
    assert len({name for name in NAMES if several.peers[name].run.run_id != first}) == 3


def test_a_party_that_resumes_with_other_bytes_is_refused_alone(
    three: Path, tmp_path: Path
) -> None:
    several, threads = without_birch(three, tmp_path, 4, after=True)
    answered = len(several.active.sent)
    changed = build_passive(three, "birch", [EVERY_2, "model_seed=5"], runs=tmp_path)
    training = changed.run.reopen()
    assert training is not None
    with torch.no_grad():
        next(training.trainer.model.parameters()).add_(1e-3)
    training.save()
    several.peers["birch"] = build_passive(three, "birch", [EVERY_2], runs=tmp_path)
    finish([start(several, "birch")])
    assert isinstance(several.errors["birch"], OutOfStep)
    assert "other bytes" in str(several.errors["birch"])
    finish(threads)
    assert all(isinstance(several.errors[name], PeerLeft) for name in ("ash", "cedar"))
    assert len(several.active.sent) <= answered


# ---- parties that put together what they receive ----


class Colluders(ActiveRecording):
    """Keeps what the parties received, and what each would have with a draw of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]] = []
        self._own = build_defense(SETTINGS)

    def on_step(self, batch: Batch, result: Step) -> None:
        super().on_step(batch, result)
        both = result.gradients, result.defended.gradient
        raw, sent = (list(gradients.detach().chunk(3, dim=1)) for gradients in both)
        separate: list[Tensor] = [self._own.defend(Step(part, result.labels))[0] for part in raw]
        self.batches.append((raw, sent, separate, result.labels))


def leak_of(received: list[Tensor], raw: list[Tensor], labels: Tensor) -> float:
    """Return the leak AUC of parties that know their gaps, and weigh each one's projection."""
    positive = labels == 1
    gaps = [part[positive].mean(dim=0) - part[~positive].mean(dim=0) for part in raw]
    scores = [part @ gap / gap.square().sum() for part, gap in zip(received, gaps, strict=True)]
    return leak_auc(torch.stack(scores).mean(dim=0), labels)


def test_parties_that_collude_in_a_run_gain_nothing_from_the_joint_draw(tmp_path: Path) -> None:
    """The same attack on the same run gains where each party's noise is drawn on its own."""
    write_several(tmp_path, 3, rows=3000)
    both = ["contract.aggregation=concat", "contract.batch_size=256", "contract.epochs=4"]
    marvell = "defense={name: marvell, strength: {power_ratio: 4}, insecure_noise_seed: 7}"
    several = build_parties(tmp_path, [*both, marvell], both)
    several.session.lifecycle.observer = several.active = seen = Colluders()
    run_together(several)
    whole = [batch for batch in seen.batches if len(batch[3]) == 256]
    assert len(whole) >= 20
    alone, jointly, separately = (
        statistics.fmean(figures)
        for figures in zip(
            *(
                (
                    statistics.fmean(
                        leak_of([part], [own], labels) for part, own in zip(sent, raw, strict=True)
                    ),
                    leak_of(sent, raw, labels),
                    leak_of(separate, raw, labels),
                )
                for raw, sent, separate, labels in whole
            ),
            strict=True,
        )
    )
    assert jointly == pytest.approx(alone, abs=0.02)
    assert separately > jointly + 0.05
    charges = several.active.ledger[-1][1].sum_kl.max / several.active_settings.contract.epochs
    assert jointly < leak_auc_bound(charges)


def test_of_several_parties_the_first_error_is_raised(tmp_path: Path) -> None:
    write_several(tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.yaml").rename(tmp_path / f"passive_{name}.yaml")
    too_many = ["contract.alignment.min_aligned=399"]
    run = simulation.build(simulation.read_settings(tmp_path, too_many, too_many))
    with pytest.raises(AlignmentError, match="too few ids"):
        run.meet()


# ---- what the parties agree on ----


def test_ids_that_only_some_have_are_no_intersection(tmp_path: Path) -> None:
    """Each pair has enough in common, and all together too little."""
    write_several(tmp_path, 3)
    both = ["contract.alignment.min_aligned=345"]
    several = build_parties(tmp_path, both, both)
    with pytest.raises(AlignmentError):
        run_together(several)
    assert "that all parties have, needed 345" in str(several.session.lifecycle.error)
    assert set(several.errors) == set(NAMES)


def test_a_share_of_too_few_rows_is_refused(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = build_parties(three)
    share_of = several.session.share_of

    def too_small(party: str, wait_s: float) -> Share | None:
        share = share_of(party, wait_s)
        return share and share._replace(mask=np.arange(len(share.mask)) < 19)

    monkeypatch.setattr(several.session, "share_of", too_small)
    with pytest.raises(AlignmentError, match="19 of them with all, needed 20"):
        run_together(several)


def test_a_handshake_waits_for_all_and_the_newest_of_a_party_counts(three: Path) -> None:
    several = build_parties(three)
    session, contract = several.session, several.active_settings.contract.canonical_json()
    replies: list[object] = []

    def shake(party: str, commitment: bytes) -> threading.Thread:
        def ask() -> None:
            try:
                replies.append(session.handshake(party, contract, commitment))
            except PeerError as error:
                replies.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        return thread

    ash = shake("ash", b"a" * 32)
    wait_until(lambda: set(session.lifecycle.stages.awaited()) == {"birch", "cedar"})
    again = shake("ash", b"b" * 32)
    ash.join(HANGS_AFTER_S)
    (displaced,) = replies
    assert isinstance(displaced, OthersAwaited)
    others = [shake(party, party.ljust(32).encode()) for party in ("birch", "cedar")]
    finish([again, *others])
    openings = [reply for reply in replies if isinstance(reply, Opening)]
    assert len(openings) == 3
    assert len({(opening.run_id, opening.nonce) for opening in openings}) == 1
    assert openings[0].commitments[0] == b"b" * 32
    # With the nonce known, another commitment starts over, with another nonce, for all.
    later = shake("ash", b"c" * 32)
    wait_until(lambda: set(session.lifecycle.stages.awaited()) == {"birch", "cedar"})
    assert session.lifecycle.run.nonce == openings[0].nonce  # of the test's seed
    assert session.run_id != openings[0].run_id
    with pytest.raises(NotOpen):
        session.require_aligning(party="birch")
    session.end(PeerLeft("the test is over"))
    finish([later])


def test_parties_agree_on_names_and_on_the_aggregation_of_several() -> None:
    values: dict[str, Any] = {"run_name": "r", "cut_shape": (4, 3), "batch_size": 8, "epochs": 1}
    one = Contract(**values, aggregation="concat")
    assert "aggregation" not in one.canonical_json()
    assert one.aggregate_shape == (4, 3)
    assert one.fields_differing_from(one.canonical_json()) == []
    two = Contract(**values, passive_parties=("ash", "birch"))
    concat = Contract(**values, passive_parties=("ash", "birch"), aggregation="concat")
    assert two.fields_differing_from(concat.canonical_json()) == ["aggregation"]
    assert (two.aggregate_shape, concat.aggregate_shape) == ((4, 3), (8, 3))
    with pytest.raises(ValidationError, match="two have the same name"):
        Contract(**values, passive_parties=("ash", "ash"))
    with pytest.raises(ValidationError):
        Contract(**values, passive_parties=tuple(f"p{number}" for number in range(9)))
