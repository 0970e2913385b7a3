"""With noisy labels, the peer receives a function of them, and of no other label.

Two runs of the same people have different labels, also in the held-out rows, and the same noisy
labels: the noise is as if it made up for the difference. Whatever else used a true label on its way
to the peer, such as a loss or a class weight, would show in some byte.
"""

import json
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party.defenses import noisy_label
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.common.models import optimizers
from splitveil.common.record.transcript import FILE
from splitveil.common.run.messages import Activation, Answer, Course, LeaveReason, Offer, Opening
from splitveil.library.in_process import InProcessPeer
from tests.record.test_transcript import run_noted
from tests.support.peers import GoesAway, Lost
from tests.support.runs import (
    Parties,
    PartyPeer,
    build_parties,
    run_in_process,
    run_together,
    write_example,
    write_several,
)
from tests.support.tables import deal_other_labels

DEFENSE = "defense={name: noisy_label, mechanism: {kind: gaussian}, insecure_noise_seed: 7}"
SMALL = ("contract.evaluation_batch_size=60", "contract.checkpoint_steps=2")


def build(
    folder: Path, *active: str, both: Sequence[str] = SMALL, runs: Path | None = None
) -> Parties:
    """Build both parties of a run with noisy labels; later overrides win."""
    return build_parties(folder, [*both, DEFENSE, *active], both, runs=runs)


# ---- two label sets, one release ----


Released = list[Tensor]
"""The noisy labels of a run, drawn once."""


@contextmanager
def noting(released: Released) -> Iterator[None]:
    draw = noisy_label.draw_noisy_labels

    def note(*arguments: Any) -> Tensor:
        released.append(draw(*arguments))
        return released[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(noisy_label, "draw_noisy_labels", note)
        yield


@contextmanager
def repeating(released: Released) -> Iterator[None]:
    """Let the noise be what makes other labels the same noisy ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(noisy_label, "draw_noisy_labels", lambda *_: released[0])
        yield


@pytest.fixture(autouse=True)
def same_run_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "ab" * count)


# ---- everything that a passive party receives, in this process ----


class Seeing(InProcessPeer):
    """Keeps everything that the passive party receives, and in which order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[bytes] = []

    def _see(self, *values: object) -> None:
        self.seen.append(pickle.dumps(values))

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        opening = super().handshake(party, contract_json, commitment, offer)
        self._see(*opening)
        return opening

    def receive_gradient(self) -> Answer:
        answer = super().receive_gradient()
        values = answer.values
        self._see(*answer.batch, str(values.dtype), tuple(values.shape), values.numpy().tobytes())
        return answer

    def evaluate(self, activation: Activation) -> Course:
        course = super().evaluate(activation)
        self._see(course.value)
        return course

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        super().leave(run_id, reason)
        self._see("goodbye", reason.value)


def seen_in(
    folder: Path, *active: str, both: Sequence[str] = (), peer: type[Seeing] = Seeing
) -> list[bytes]:
    """Run, with a recorder that measures leaks and evaluations, and return what the peer saw."""
    parties = build(folder, *both, *active, both=[*SMALL, *both])
    peers: list[Seeing] = []

    def connect(*arguments: Any) -> Seeing:
        peers.append(peer(*arguments))
        return peers[0]

    (folder / "results").mkdir(exist_ok=True)
    torch.manual_seed(0)  # dropout draws from where the process is
    with ActiveRecorder(parties.active_settings, folder / "results") as recorder:
        parties.session.lifecycle.observer = recorder
        run_in_process(parties, connect)
    return peers[0].seen


class Folders(NamedTuple):
    """Two copies of one example, which differ in their labels."""

    one: Path
    other: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = Folders(*(tmp_path_factory.mktemp(name) for name in Folders._fields))
    for folder in found:
        write_example(folder)
        with_categories(folder)
        with_weights(folder)
    deal_other_labels(found.other / "active.csv")
    return found


def with_categories(folder: Path) -> None:
    for party, generator in (
        ("active", np.random.default_rng(8)),
        ("passive", np.random.default_rng(9)),
    ):
        path = folder / f"{party}.csv"
        lines = path.read_text().splitlines()
        more = [f"{line},{generator.choice(['a', 'b', 'c', 'd'])}" for line in lines[1:]]
        path.write_text("\n".join([f"{lines[0]},kind", *more]) + "\n")


def with_weights(folder: Path) -> None:
    generator = np.random.default_rng(10)
    lines = (folder / "active.csv").read_text().splitlines()
    more = [f"{line},{generator.uniform(0.2, 3.0):.3f}" for line in lines[1:]]
    (folder / "active.csv").write_text("\n".join([f"{lines[0]},weight", *more]) + "\n")


MONITOR = (
    "leak_monitor={max_cpu_share: null, attacks: [norm, cosine, spectral, accumulated_spectral]}"
)
WIDE_DEEP = (
    "top_model={kind: wide_deep, hidden: [6]}",
    "data.features={numeric: own*, categorical: kind}",
    "optimizer={kind: adam, learning_rate: 0.01}",
)

RUNS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "plain": ((), ()),
    "a monitor": ((MONITOR,), ()),
    "a linear top model": (("top_model={kind: mlp, hidden: []}",), ()),
    "dropout": (("top_model={kind: mlp, hidden: [8], dropout: 0.3}",), ()),
    "wide and deep": (WIDE_DEEP, ()),
    "no features of its own": (("data.features=null",), ()),
    "sixteen bits": ((), ("contract.cut_dtype=bfloat16",)),
    "class weights": (("data.class_weights=[0.5, 4]",), ()),
    "weights of rows": (
        (
            "data.weight_column=weight",
            "data.weights_are_label_free=true",
            "data.class_weights=[1, 3]",
        ),
        (),
    ),
    "a posterior": (("defense.mechanism.posterior=model",), ("contract.drop_last=true",)),
}


def seen_in_both(
    folders: Folders, *active: str, both: Sequence[str] = (), peer: type[Seeing] = Seeing
) -> tuple[list[bytes], list[bytes]]:
    """Return what the peer saw of either labels, with the same noisy labels."""
    released: Released = []
    with noting(released):
        one = seen_in(folders.one, *active, both=both, peer=peer)
    with repeating(released):
        other = seen_in(folders.other, *active, both=both, peer=peer)
    assert released
    return one, other


@pytest.mark.parametrize("run", RUNS)
def test_with_the_same_noisy_labels_the_peer_receives_the_same_bytes(
    folders: Folders, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each step of an embedding table touches only the batch's rows."""
    monkeypatch.setattr(optimizers, "SPARSE_FROM_ROWS", 2)
    active, both = RUNS[run]
    one, other = seen_in_both(folders, *active, both=both)
    assert len(one) > 10
    assert one == other


class Sends(InProcessPeer):
    """Sends other values than its model's."""

    change: Callable[[Tensor], Tensor]

    def _changed(self, activation: Activation) -> Activation:
        return Activation(activation.batch, type(self).__dict__["change"](activation.values))

    def send_activation(self, activation: Activation) -> None:
        super().send_activation(self._changed(activation))

    def evaluate(self, activation: Activation) -> Course:
        return super().evaluate(self._changed(activation))


def two_groups(values: Tensor) -> Tensor:
    """Return vectors of which every second one is huge."""
    sent = torch.full_like(values, 0.5)
    sent[::2] = torch.tensor([1e4, -2e4, 3e4, 1.0])
    return sent


def test_so_does_a_peer_that_chooses_what_it_sends(folders: Folders) -> None:
    one, other = seen_in_both(
        folders, peer=type("Chooses", (Sends, Seeing), {"change": two_groups})
    )
    assert one == other


def test_so_does_one_that_is_killed_and_comes_again(folders: Folders, tmp_path: Path) -> None:
    released: Released = []
    runs = []
    for folder, around in ((folders.one, noting), (folders.other, repeating)):
        seen: list[bytes] = []

        class Killed(GoesAway, Seeing):
            """Is killed in the second epoch, and sees more before and after that."""

            goes_at: int | None = 7

            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.seen = seen  # noqa: B023 - used up within the loop

        with around(released):
            runs_folder = tmp_path / folder.name
            with pytest.raises(Lost):
                run_in_process(build(folder, runs=runs_folder), Killed)
            again = build(folder, runs=runs_folder)
            again.session.reopen()
            run_in_process(again, type("ComesAgain", (Killed,), {"goes_at": None}))
        assert again.active.resumed == [1]
        runs.append(seen)
    assert runs[0] == runs[1]
    assert torch.equal(*released)


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_with_several_passive_parties_each_of_them_receives_the_same_bytes(
    tmp_path: Path, aggregation: str
) -> None:
    released: Released = []
    runs = []
    for name, around in (("one", noting), ("other", repeating)):
        folder = tmp_path / name
        write_several(folder, 2, rows=200)
        if name == "other":
            deal_other_labels(folder / "active.csv")
        with around(released):
            runs.append(seen_by_several(folder, f"contract.aggregation={aggregation}"))
    assert len(released) == 1
    assert runs[0].keys() == {"ash", "birch"}
    assert runs[0] == runs[1]


def seen_by_several(folder: Path, *both: str) -> dict[str, list[bytes]]:
    seen: dict[str, list[bytes]] = {}

    class SeeingParty(Seeing, PartyPeer):
        """One of several, each of which has a list of its own."""

        def __init__(self, everybody: Parties, party: str) -> None:
            PartyPeer.__init__(self, everybody, party)
            self.seen = seen.setdefault(party, [])

    everybody = build_parties(folder, [*SMALL, *both, DEFENSE], [*SMALL, *both])
    run_together(everybody, SeeingParty)
    return seen


def test_over_the_wire_every_message_after_the_alignment_has_the_same_bytes(
    folders: Folders, tmp_path: Path
) -> None:
    """The alignment draws random numbers of its own, before any label is used."""
    released: Released = []
    sent = []
    for folder, around in ((folders.one, noting), (folders.other, repeating)):
        into = tmp_path / folder.name
        with around(released):
            run_noted(folder, into, DEFENSE)
        lines = (into / "active" / FILE).read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        sent.append([what(entry) for entry in entries if entry.get("direction") == "sent"])
    kinds = {entry[0] for entry in sent[0]}
    assert {"Handshake reply", "Train reply", "Evaluate reply", "Leave reply"} <= kinds
    without = [[one for one in each if not one[0].startswith("Align")] for each in sent]
    assert without[0] == without[1]


def what(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["kind"], entry["epoch"], entry["step"], entry["bytes"], entry["digest"]


# ---- the comparison would notice ----


def test_other_noisy_labels_would_show(folders: Folders) -> None:
    assert seen_in(folders.one) != seen_in(folders.other)


def test_a_top_model_that_learned_from_the_true_labels_would_show(folders: Folders) -> None:
    one, other = seen_in_both(folders, "defense.top_labels='true'")
    differ = [number for number, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    first_answer = 1  # after the handshake's reply; it needs no step of the top
    assert differ[0] == first_answer + 1


def test_the_labels_do_differ_in_every_split(folders: Folders) -> None:
    runs = [build(folder) for folder in folders]
    for run in runs:
        run_in_process(run)
    rows = runs[0].active.rows
    assert rows is not None
    for positions in rows.splits.values():
        one, other = (run.session.lifecycle.trainer.labels_of(positions) for run in runs)  # type: ignore[union-attr]
        assert 0.2 < float((one != other).float().mean()) < 0.8
    assert not torch.equal(*(run.active.sent[0] for run in runs))
