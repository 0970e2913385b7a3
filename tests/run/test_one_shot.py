"""Runs that exchange each row once: what is sent, charged, refused, and resumed."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml
from scipy import stats
from torch import Tensor

from splitveil.active_party.defenses import AnswerKeys, NoisyLabelDefense, Secrets
from splitveil.active_party.defenses.dp_bounds import leak_auc_of_mu
from splitveil.active_party.defenses.interface import DefenseContext
from splitveil.active_party.ledger.account_book import LEDGER
from splitveil.common.errors import (
    BudgetExhausted,
    Interrupted,
    InvalidMessage,
    OutOfStep,
    SettingsError,
)
from splitveil.common.models import components
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.model_files import save_tensors
from splitveil.common.run.messages import Activation, Answer, Course, DefendedGradient, LeaveReason
from splitveil.library.in_process import InProcessPeer, clear_engine
from splitveil.library.predicting import predict
from splitveil.library.simulating import simulate
from splitveil.passive_party import assembly
from tests.support import simulation
from tests.support.endpoints import value_of
from tests.support.peers import DiesAt, Lost
from tests.support.runs import (
    NAMES,
    Parties,
    build_parties,
    run_in_process,
    run_together,
    write_example,
    write_several,
)
from tests.support.tables import swap_labels, write_classes, write_numbers

ONE_SHOT = ("contract.exchange=one_shot",)
PCA = "bottom_model={kind: pca}"
NOISY = (*ONE_SHOT, "contract.release=noisy_labels")
RELEASE = "defense={name: noisy_label, mechanism: {kind: gaussian}, insecure_noise_seed: 7}"
SCORE = "bottom_model={kind: score}"


@pytest.fixture(scope="module", autouse=True)
def _without_masked_ids() -> Iterator[None]:
    """Align by ids in the clear: nothing here depends on how the common rows are found."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulation, "build_engine", clear_engine)
        yield


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder, rows=160)
    return folder


def one_shot(folder: Path, *, noisy: bool = True, runs: Path | None = None) -> Parties:
    both = NOISY if noisy else ONE_SHOT
    active = [*both, *([RELEASE] if noisy else [])]
    passive = [*both, SCORE if noisy else PCA, "adversary=null"]
    return build_parties(folder, active, passive, runs=runs)


def of_run(parties: Parties) -> dict[str, Tensor]:
    """Return all that a run leaves: both models, activations as received, and the release."""
    trainer, other = parties.session.lifecycle.answering.trainer, parties.run.trainer
    assert trainer.memory is not None
    assert other is not None
    held = {"received": trainer.memory.state_dict()["values"]}
    if other.released is not None:
        held |= {"rows": other.released[0], "noisy": other.released[1]}
    return parties.weights() | held


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


# ---- resuming ----


class Ends(DiesAt):
    """Ends where so many messages are answered: killed after one, or interrupted before one."""

    def _maybe_die(self, *, after: bool) -> None:
        answered = self.session.lifecycle.batch_number
        if after is self.after and self.at in (None, answered):
            raise Lost if after or self.at is None else Interrupted

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        if reason is LeaveReason.INTERRUPTED:  # which saves both parties' states
            InProcessPeer.leave(self, run_id, reason)
        else:
            super().leave(run_id, reason)


def ending(at: int | None = None, *, after: bool = False) -> Callable[..., InProcessPeer]:
    """Return a peer that ends there, or before its first message."""
    return type("Ending", (Ends,), {"at": at, "after": after})


@pytest.mark.parametrize(("noisy", "messages"), [(False, 4), (True, 6)])
def test_a_run_that_ends_at_every_message_ends_with_the_same_bits(
    tmp_path: Path, noisy: bool, messages: int
) -> None:
    write_example(tmp_path, rows=160)
    assert_goes_on(tmp_path, lambda runs: one_shot(tmp_path, noisy=noisy, runs=runs), messages)


def assert_goes_on(folder: Path, build: Callable[[Path | None], Parties], messages: int) -> None:
    """Hold a run that ends at every message, in both ways, against one that does not."""
    whole = build(None)
    run_in_process(whole)
    assert whole.session.lifecycle.batch_number == messages

    def started(name: str) -> Parties:
        both = build(folder / name)
        both.session.reopen()
        return both

    for answered in range(messages):
        with pytest.raises(Interrupted):
            run_in_process(started("interrupted"), ending(answered))
    both = started("killed")
    for answered in range(1, messages + 1):
        with pytest.raises(Lost):
            run_in_process(both, ending(answered, after=True))
        alone = build(folder / "killed")
        alone.session = both.session
        with suppress(Lost):  # a run that is over asks nothing
            run_in_process(alone, ending())
        both = started("killed")
    for resumed in (both, started("interrupted")):
        run_in_process(resumed)
        assert_equal(of_run(resumed), of_run(whole))
        assert resumed.session.leak_bounds() == whole.session.leak_bounds()


# ---- what is refused before anything is sent ----

GRADIENTS = "expected none, as contract.release: null says"
REFUSED: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    "a bottom model that would have to learn": (ONE_SHOT, [], "bottom_model.kind: mlp learns"),
    "a defense of gradients": ([*ONE_SHOT, "defense={name: marvell}"], [PCA], GRADIENTS),
    "a release that nobody agreed on": ([*ONE_SHOT, RELEASE], [PCA], GRADIENTS),
    "labels without a defense": (NOISY, [SCORE], "expected noisy_label by gaussian noise"),
    "noise of another kind": (
        [*NOISY, "defense={name: noisy_label, mechanism: {kind: laplace, epsilon: 1}}"],
        [SCORE],
        "expected noisy_label by gaussian noise",
    ),
    "an early end": (
        [*ONE_SHOT, "early_stopping_epochs=1"],
        [PCA],
        "early_stopping_epochs: a one-shot run ends with its last row",
    ),
    "a score without labels": (ONE_SHOT, [SCORE], "bottom_model.kind: a score is fitted to noisy"),
    "labels in a run with gradients": (["contract.release=noisy_labels"], [], "release: only"),
    "more scores than values": (
        [*NOISY, RELEASE, "contract.scores=5", "data.classes=[a, b, c, d, e, f]"],
        [SCORE],
        "cut_shape: 5 scores need at least 5 values",
    ),
    "more values than directions": (
        [*NOISY, RELEASE, "contract.cut_shape=[90]"],
        [SCORE],
        "have 80 independent directions; expected contract.cut_shape of at most [80], got [90]",
    ),
    "more classes than scores": (
        [*NOISY, RELEASE, "data.classes=[a, b, c, d]"],
        [SCORE],
        "contract.scores: expected 3, got 1: one for each of 4 classes but one",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_do_not_fit_are_refused(example: Path, what: str) -> None:
    active, passive, reads = REFUSED[what]
    agreed = [one for one in active if one.startswith("contract.")]
    with pytest.raises(SettingsError, match=re.escape(reads)):
        build_parties(example, active, [*agreed, *passive])


def test_what_cannot_be_fitted_is_refused_before_any_label_is_released(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties = one_shot(example)
    monkeypatch.setattr(components, "MOST_DENSE", 3)
    with pytest.raises(SettingsError, match=r"a score is fitted to at most 3 codes"):
        run_in_process(parties)
    assert not parties.session.lifecycle.has_answered
    assert parties.session.leak_bounds().sum_kl.max == 0


# ---- a peer that does not keep to the course ----


class Altering(InProcessPeer):
    """Sends something else in place of the first question of a pass."""

    split: ClassVar[str]
    altered: ClassVar[Callable[[Activation], Sequence[Activation]]]

    def _instead(self, activation: Activation) -> Sequence[Activation]:
        batch = activation.batch
        is_first = batch.split == self.split and batch.step == 0
        return type(self).altered(activation) if is_first else [activation]

    def _exchange(self, activation: Activation) -> Answer:
        return [super(Altering, self)._exchange(one) for one in self._instead(activation)][-1]

    def evaluate(self, activation: Activation) -> Course:
        return [super(Altering, self).evaluate(one) for one in self._instead(activation)][-1]


def with_values(change: Callable[[Tensor], Tensor]) -> Callable[[Activation], Activation]:
    return lambda sent: replace(sent, values=change(sent.values))


def of_batch(**changes: Any) -> Callable[[Activation], Activation]:
    return lambda sent: replace(sent, batch=sent.batch._replace(**changes))


Sent = Sequence[Callable[[Activation], Activation]]
ONCE_MORE: Callable[[Activation], Activation] = lambda sent: sent  # noqa: E731
STRAY: dict[str, tuple[str, Sent]] = {
    "rows again with other values": ("activations", [ONCE_MORE, with_values(lambda one: one + 1)]),
    "rows again as the next ones": ("activations", [ONCE_MORE, of_batch(step=1)]),
    "other rows": ("activations", [of_batch(rows_digest=bytes(16))]),
    "too many rows": ("activations", [with_values(lambda one: torch.cat([one, one]))]),
    "no rows": ("activations", [with_values(lambda one: one[:0])]),
    "labels again with other bytes": (
        "labels",
        [ONCE_MORE, with_values(lambda one: torch.ones(len(one), 4))],
    ),
    "labels of other rows": ("labels", [of_batch(rows_digest=bytes(16))]),
    "labels of fewer rows": ("labels", [with_values(lambda one: one[1:])]),
    "training rows for a gradient": ("labels", [of_batch(split="train")]),
}


@pytest.mark.parametrize("what", STRAY)
def test_a_question_that_is_not_due_is_refused(example: Path, what: str) -> None:
    """Its labels are charged at most once, and the error names no row."""
    split, sent = STRAY[what]
    parties = one_shot(example)

    def altered(activation: Activation) -> Sequence[Activation]:
        return [change(activation) for change in sent]

    peer = type("Strays", (Altering,), {"split": split, "altered": staticmethod(altered)})
    with pytest.raises(OutOfStep) as refused:
        run_in_process(parties, peer)
    assert "person-" not in str(refused.value)
    assert parties.session.leak_bounds().sum_kl.max in (0, 0.25)


def test_labels_are_not_given_in_a_run_without_them(example: Path) -> None:
    parties = one_shot(example, noisy=False)

    class Asks(InProcessPeer):
        def evaluate(self, activation: Activation) -> Course:
            batch = activation.batch._replace(split="labels")
            self._exchange(Activation(batch, activation.values[:, :0]))
            return Course.STOP

    with pytest.raises(OutOfStep, match="expected a batch of activations now"):
        run_in_process(parties, Asks)
    assert parties.session.leak_bounds().sum_kl.max == 0


@pytest.mark.parametrize("values", [2, 5])
def test_labels_of_more_values_than_agreed_end_the_run(example: Path, values: int) -> None:
    """A label owner that lies about its classes would aim as many scores at columns."""

    class Widens(InProcessPeer):
        def receive_gradient(self) -> Answer:
            found = super().receive_gradient()
            return Answer(found.batch, DefendedGradient(found.values.repeat(1, values)))

    with pytest.raises(InvalidMessage, match="other than 1 values"):
        run_in_process(one_shot(example), Widens)


# ---- what a release is, and what it is charged ----


class Notes(InProcessPeer):
    """Keeps the labels that come down."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.labels: list[Tensor] = []

    def receive_gradient(self) -> Answer:
        found = super().receive_gradient()
        self.labels.append(found.values)
        return found


def released_to(parties: Parties) -> Tensor:
    """Run, and return the noisy labels, (training rows, values), in the common order."""
    peers: list[Notes] = []

    def connect(*given: Any) -> Notes:
        peers.append(Notes(*given))
        return peers[-1]

    run_in_process(parties, connect)
    return torch.cat(peers[0].labels)


def released(label: float, seed: int) -> Tensor:
    """Return what is released of three rows, of which the second has a label, (3,)."""
    context = DefenseContext((4,), is_one_shot=True)
    defense = NoisyLabelDefense(insecure_noise_seed=seed)
    key = defense.open_noise_key(context, Path("none"))
    labels = torch.tensor([0.0, label, 1.0])
    built = defense.build(context, Secrets(key, AnswerKeys(), ["ann", "bob", "cid"], labels))
    return torch.as_tensor(built.released_labels(torch.arange(3)).gradient).flatten()


def test_of_tables_that_differ_in_one_label_all_but_its_noisy_value_is_equal() -> None:
    """That value is the label and noise of one law, which an unshifted comparison rejects."""
    seeds = range(250)
    of_zero = torch.stack([released(0, seed) for seed in seeds])
    assert torch.equal(
        of_zero[:, [0, 2]], torch.stack([released(1, seed) for seed in seeds])[:, [0, 2]]
    )
    of_one = torch.stack([released(1, 1000 + seed) for seed in seeds])[:, 1]
    values = of_zero[:, 1].numpy()
    assert stats.ks_2samp(values, of_one.numpy() - 1).pvalue > 0.01
    assert stats.ks_2samp(values, of_one.numpy()).pvalue < 0.01
    assert stats.kstest(values / 2, "norm").pvalue > 0.01  # noise_ratio 2


def test_a_release_is_charged_once_and_one_of_another_strength_besides(
    example: Path, tmp_path: Path
) -> None:
    first = one_shot(example)
    noisy = released_to(first)
    trained = first.session.lifecycle.answering.rows.splits["train"]
    assert len(noisy) == len(trained)
    bounds = first.session.leak_bounds()
    assert bounds.sum_kl.max == bounds.sum_kl.mean == 0.25
    assert bounds.guarantee.max == pytest.approx(leak_auc_of_mu(0.5))
    book = first.session.lifecycle.account_book()
    save_tensors(tmp_path, LEDGER, book.state_dict())
    after = f"earlier_ledgers=[{tmp_path}/checkpoint]"
    again = build_parties(example, [*NOISY, RELEASE, after], [*NOISY, SCORE])
    assert torch.equal(released_to(again), noisy)
    assert again.session.leak_bounds().sum_kl.max == 0.25
    stronger = RELEASE.replace("gaussian", "gaussian, noise_ratio: 1")
    other = build_parties(example, [*NOISY, stronger, after], [*NOISY, SCORE])
    run_in_process(other)
    assert other.session.leak_bounds().sum_kl.max == 0.25 + 1


def test_a_budget_forbids_a_release_above_it_and_none_where_nothing_is_released(
    example: Path,
) -> None:
    enough, too_little = "run_budget={leak_auc: 0.65}", "run_budget={leak_auc: 0.6}"
    run_in_process(build_parties(example, [*NOISY, RELEASE, enough], [*NOISY, SCORE]))
    refused = build_parties(example, [*NOISY, RELEASE, too_little], [*NOISY, SCORE])
    with pytest.raises(BudgetExhausted, match="epoch 1 step 1"):
        run_in_process(refused)
    assert refused.session.leak_bounds().sum_kl.max == 0
    free = build_parties(example, [*ONE_SHOT, "run_budget={leak_auc: 0.51}"], [*ONE_SHOT, PCA])
    run_in_process(free)
    assert free.session.leak_bounds().guarantee.max == 0.5


def test_a_label_that_is_corrected_after_its_release_is_released_as_before(tmp_path: Path) -> None:
    """Otherwise the same noise on both labels would reveal both."""
    write_example(tmp_path, rows=160)
    keyed = RELEASE.replace("seed: 7", "seed: null")
    parties = partial(
        build_parties, tmp_path, [*NOISY, keyed, f"noise_key_path={tmp_path}/noise.key"]
    )
    before = released_to(parties([*NOISY, SCORE]))
    swap_labels(tmp_path / "active.csv")
    assert torch.equal(released_to(parties([*NOISY, SCORE])), before)


@pytest.mark.parametrize("count", [2, 3])
def test_noisy_labels_are_one_release_whoever_receives_them(tmp_path: Path, count: int) -> None:
    """Each party has a bottom model of its own kind, and their values stand side by side."""
    write_several(tmp_path, count)
    for name, kind in zip(NAMES[:count], ("score", "pca", "score"), strict=False):
        path = tmp_path / f"{name}.yaml"
        written = yaml.safe_load(path.read_text()) | {"bottom_model": {"kind": kind}}
        path.write_text(yaml.safe_dump(written))
    both = [*NOISY, "contract.aggregation=concat"]
    several = build_parties(tmp_path, [*both, RELEASE], both)
    run_together(several)
    assert several.session.leak_bounds().sum_kl.max == 0.25
    trainer = several.session.lifecycle.answering.trainer
    assert trainer.memory is not None
    assert trainer.memory.state_dict()["values"].shape[1] == 4 * count
    with pytest.raises(SettingsError, match=r"contract\.aggregation: expected concat"):
        build_parties(tmp_path, [*NOISY, RELEASE], NOISY)


# ---- runs with their results ----

KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "a score alone": (partial(write_example, rows=700), {"contract.cut_shape": [1]}),
    "a score and a column": (
        partial(write_example, rows=700),
        {"passive.bottom_model": {"kind": "score", "columns": 1}},
    ),
    "components": (
        write_example,
        {"passive.bottom_model": {"kind": "pca"}, "contract.drop_last": True},
    ),
    "classes": (write_classes, {"contract.scores": 3}),
    "numbers": (write_numbers, {"contract.cut_shape": [2]}),
}


@pytest.mark.parametrize("what", KINDS)
def test_a_run_leaves_models_figures_and_a_report(tmp_path: Path, what: str) -> None:
    write, changed = KINDS[what]
    write(tmp_path)
    is_noisy = changed.get("passive.bottom_model", {}).get("kind") != "pca"
    settings = {
        "contract.exchange": "one_shot",
        "contract.release": "noisy_labels" if is_noisy else None,
        "passive.bottom_model": {"kind": "score"},
        "active.serving.fallback": True,
        "active.optimizer.learning_rate": 0.02,
    } | changed
    defense = "noisy_label" if is_noisy else "none"
    (run,) = simulate(tmp_path, defense=defense, settings=settings, threads=1)
    assert run.bounds["anybody"] == pytest.approx(leak_auc_of_mu(0.5) if is_noisy else 0.5)
    figures = run.summary
    if what == "numbers":
        assert figures["test_rmse"] < figures["test_rmse_alone"]
    else:
        assert figures["test_auc"] > figures["test_auc_alone"]
    assert figures["steps"] is None
    page = run.report().read_text()
    assert ("Nothing that depends on a label was sent." in page) is not is_noisy
    assert ("No label revealed</span>" in page) is not is_noisy
    assert re.search(r"Columns: \d+ of 100</text>", page)
    assert "was not measured" not in page
    assert run.overview()["strongest_attack"] == "no gradient to attack"
    if not is_noisy:
        assert {one.name for one in run.export(tmp_path)} == {"active.pt2", "passive.pt2"}


def test_operators_see_a_run_without_steps(example: Path) -> None:
    parties = one_shot(example, noisy=False)
    run_in_process(parties)
    rows = parties.active.rows
    assert rows is not None
    status = RunStatus("passive", parties.passive_settings.contract)
    status.note_aligned(rows)
    for epoch in (0, None):
        status.note_resumed(epoch)
        shown = [
            value_of(status, f"splitveil_{name}") for name in ("course_steps", "epochs", "epoch")
        ]
        assert shown == [0, 1, 1]


def test_a_constant_column_and_a_category_of_no_training_row_leave_predictions() -> None:
    generator = np.random.default_rng(1)
    x, category = generator.normal(size=600), generator.integers(0, 4, 600)
    label = (x + (category == 1) + 0.5 * generator.normal(size=600) > 0).astype(int)
    ids = [f"person-{number}" for number in range(600)]
    texts = [f"c{one}" for one in category]
    passive = {"id": ids, "x": x, "same": np.ones(600), "c": texts}
    active = {"id": ids, "label": label, "own": generator.normal(size=600)}
    settings = {
        "contract.exchange": "one_shot",
        "contract.release": "noisy_labels",
        "contract.cut_shape": [3],
        "passive.bottom_model": {"kind": "score"},
    }
    tables: dict[str, Any] = {"active": active, "passive": passive, "key": "id"}
    (run,) = simulate(**tables, defense="noisy_label", settings=settings, threads=1)
    assert run.test_auc is not None
    assert run.test_auc > 0.8
    usual = np.asarray(predict(run)["probability"])
    unseen = {**passive, "c": ["another"] * 30 + texts[30:]}
    other = np.asarray(predict(run, tables={"passive": unseen})["probability"])
    assert np.isfinite(other).all()
    assert not np.array_equal(usual, other)


@pytest.mark.parametrize(("most", "is_of_all"), [(1, True), (50, False)])
def test_components_are_of_drawn_rows_or_of_all_if_these_have_too_few_directions(
    example: Path, monkeypatch: pytest.MonkeyPatch, most: int, is_of_all: bool
) -> None:
    found = []
    for rows in (160, most):
        monkeypatch.setattr(assembly, "MOST_FITTED", rows)
        parties = one_shot(example, noisy=False)
        run_in_process(parties)
        assert parties.run.trainer is not None
        found.append(parties.run.trainer.model.state_dict()["weight"])
    assert np.array_equal(*found) is is_of_all
