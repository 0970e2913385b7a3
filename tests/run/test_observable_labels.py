"""Nothing that the peer observes is a function of true labels, but through what was released.

The peer knows every label but one, and brings rows of one label and that row: if the runs of both
values of the label differ in anything, it reads the label. So two runs with both values are
compared in all that a peer has: every message and its order, how the run ends, its own files, and
the operations that the active party does between its messages, which are counted and not timed.
What the defense releases is the same in both runs, as if its noise made up for the difference.

With a leak monitor, torch's operations are compared and not the calls: a batch of one class leaves
no figures, so that less is noted of it. What attacks do depends on labels, and is done by a thread
for which no call waits.
"""

import csv
import gc
import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from splitveil.active_party.defenses import noisy_label
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.trainer_builder import TrainerBuilder
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.errors import DataError, SplitveilError
from splitveil.common.privacy.audit import AuditedBatch, LeakAudit
from splitveil.common.privacy.audit_worker import AuditWorker
from splitveil.common.privacy.observation import Observation
from splitveil.common.record import leak_recorder
from splitveil.common.run.course import AlignedRows
from splitveil.library.in_process import InProcessPeer
from tests.defenses.test_noisy_label_view import Seeing, same_run_ids, seen_by_several
from tests.support.peers import GoesAway, Lost, dying
from tests.support.runs import Parties, build_parties, run_in_process, write_example, write_several
from tests.support.waiting import HANGS_AFTER_S

__all__ = ["same_run_ids"]

# ---- tables of which a peer has picked the rows, so that one label decides about a class ----


class Labels(NamedTuple):
    """What is written for both classes of the example, and for the row about which a peer asks."""

    negative: str
    positive: str
    other: str
    settings: Sequence[str] = ()


KINDS = {
    "two classes": Labels("0", "1", "1"),
    "several classes": Labels("bus", "van", "opel", ["data.classes=[bus, van, opel]"]),
    "numbers": Labels("2.5", "7.5", "9", ["data.label_range={low: 0, high: 10}"]),
}
PARTS = ("train", "validation", "test")


def write_picked(folder: Path, kind: str, part: str, *, other: bool) -> None:
    """Write tables of which the peer has picked the rows.

    In one split, and without splits by the column ``part`` in all of them, it brings rows of one
    label, and one row that may have another.

    Args:
        folder: for tables and settings.
        kind: of the labels.
        part: that split; empty for all.
        other: whether that row has the other label.
    """
    write_example(folder)
    labels = KINDS[kind]
    tables = {}
    for name in ("active", "passive"):
        with (folder / f"{name}.csv").open() as file:
            tables[name] = {row["id"]: row for row in csv.DictReader(file)}
        for one, row in tables[name].items():
            row["part"] = PARTS[int(one[-1]) % 3]
    known = {one: row for one, row in tables["active"].items() if one in tables["passive"]}
    asked = [one for one, row in known.items() if part in ("", row["part"])]
    negative = [one for one in asked if known[one]["label"] == "0"]
    for place, row in enumerate(tables["active"].values()):
        row["label"] = labels.negative if row["label"] == "0" else labels.positive
        if place % 7 == 3 and row["id"] not in negative:
            row["label"] = labels.other
    if other:
        tables["active"][negative[0]]["label"] = labels.other
    left_out = set(asked) - set(negative)
    tables["passive"] = {o: row for o, row in tables["passive"].items() if o not in left_out}
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(next(iter(table.values()))))
            writer.writeheader()
            writer.writerows(table.values())


# ---- what is released, once for both runs ----

Released = list[Any]
RELEASING = ((noisy_label, "draw_noisy_labels"),)


@contextmanager
def releasing(released: Released, *, again: bool) -> Iterator[None]:
    """Keep what a run releases, or let the next run release the same."""
    before = iter(list(released))

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def release(*arguments: Any, **named: Any) -> Any:
            found = original(*arguments, **named)
            if again:
                return next(before, found)
            released.append(found)
            return found

        return release

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in RELEASING:
            patched.setattr(owner, name, instead(getattr(owner, name)))
        yield


# ---- everything that a peer observes ----


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations by shape, and calls within the package, of this thread."""

    counts_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        shapes = [tuple(one.shape) for one in args if isinstance(one, Tensor)]
        self.counts[f"{func} {shapes}"] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Operations":
        super().__enter__()  # type: ignore[no-untyped-call]
        gc.disable()  # what it collects meanwhile depends on what came before
        if self.counts_calls:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        gc.enable()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not frame.f_globals.get("__name__", "").startswith("splitveil."):
            return
        name = frame.f_code.co_qualname
        if event == "call":
            self.counts[name] += 1
        elif event == "c_call":
            self.counts[f"{name}: {argument.__qualname__}"] += 1


class Counted:
    """The active party's session, which counts what each call of a peer makes it do."""

    CALLS = ("handshake", "aligned", "exchange", "evaluate", "finish_step", "leave", "end")

    def __init__(self, session: ActiveSession, observed: list[Any]) -> None:
        self._session, self._observed = session, observed

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)
        if name not in self.CALLS:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            observer = self._session.lifecycle.observer
            monitor = observer._watch.monitor if isinstance(observer, ActiveRecorder) else None
            if monitor is not None:  # a checkpoint has more tensors once a batch is measured
                assert monitor.wait_until_idle(HANGS_AFTER_S)
            operations = Operations()
            try:
                with operations:
                    return found(*arguments, **named)
            finally:
                self._observed.append((name, operations.counts))

        return call


class Picky(GoesAway, Seeing):
    """Goes away in the middle of an epoch, and comes back, as often as it likes."""

    def __init__(
        self, seen: list[Any], goes_at: int | None, session: ActiveSession, engine: Any
    ) -> None:
        super().__init__(Counted(session, seen), engine)
        self.seen = seen
        self.goes_at = goes_at


def observed_in(folder: Path, active: Sequence[str], both: Sequence[str]) -> list[Any]:
    """Run twice as far as the middle of an epoch, and then to the end; return what the peer has."""
    observed: list[Any] = []
    runs = folder / "runs"
    passive = [*both, "adversary=null"]
    if ONE_SHOT in both:
        kind = "score" if NOISY in both else "pca"
        passive.append(f"bottom_model={{kind: {kind}}}")
    results = folder / "results"
    results.mkdir()
    for goes_at in (3, 2, None):
        parties = build_parties(folder, [*both, *active], passive, runs=runs)
        torch.manual_seed(0)
        with ActiveRecorder(parties.active_settings, results) as recorder:
            parties.session.lifecycle.observer = recorder
            parties.session.reopen()
            observed.append(ending(parties, partial(Picky, observed, goes_at)))
        observed += list(files_in(runs / "passive"))
    return observed


def ending(parties: Parties, connect: Callable[..., InProcessPeer]) -> str:
    try:
        run_in_process(parties, connect)
    except (SplitveilError, Lost) as error:
        return f"{type(error).__name__} {error}"
    return "finished"


def files_in(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the comparison ----

BY_COLUMN = "contract.split={kind: column, column: part}"
ONE_SHOT, NOISY = "contract.exchange=one_shot", "contract.release=noisy_labels"
SMALL = ("contract.evaluation_batch_size=40", "contract.checkpoint_steps=2")


def noisy(mechanism: str) -> str:
    return f"defense={{name: noisy_label, mechanism: {mechanism}, insecure_noise_seed: 7}}"


GAUSSIAN = noisy("{kind: gaussian}")
LAPLACE = noisy("{kind: laplace, epsilon: 0.5}")
RESPONSE = noisy("{kind: randomized_response, epsilon: 0.5}")
POSTERIOR = noisy("{kind: gaussian, posterior: model}")

OF_ANYBODY = {
    "two classes": (
        GAUSSIAN,
        LAPLACE,
        RESPONSE,
        noisy("{kind: alibi, epsilon: 0.5}"),
        POSTERIOR,
    ),
    "several classes": (RESPONSE, POSTERIOR),
    "numbers": (GAUSSIAN,),
}


def assert_same_for_both_labels(
    folder: Path,
    kind: str,
    part: str,
    active: Sequence[str],
    both: Sequence[str],
    end: str = "finished",
) -> None:
    runs: list[list[Any]] = []
    released: Released = []
    # The first run fills caches and imports modules, which is the work of another one, too.
    for name, other in (("first", False), ("one", False), ("other", True)):
        into = folder / name
        write_picked(into, kind, part, other=other)
        with releasing(released, again=bool(runs)):
            runs.append(observed_in(into, [*KINDS[kind].settings, *active], [*SMALL, *both]))
    _, one, with_other = runs
    assert bool(released) is (ONE_SHOT not in both or NOISY in both)
    assert [seen for seen in one if isinstance(seen, str)][-1].startswith(end)
    found = differences(one, with_other)
    assert not found, "\n".join(map(str, found))


def differences(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Return what only one of two runs has, at the first place where they differ."""
    for seen in zip_longest(one, other):
        if seen[0] == seen[1]:
            continue
        if all(isinstance(each, tuple) and isinstance(each[-1], Counter) for each in seen):
            counts = [each[-1] for each in seen]
            return [seen[0][0], counts[0] - counts[1], seen[1][0], counts[1] - counts[0]]
        return list(seen)
    return []


QUICK = {("two classes", "test"), ("several classes", "validation"), ("numbers", "test")}
CASES = [
    *((kind, one, "train") for kind, found in OF_ANYBODY.items() for one in found),
    *(  # one function evaluates both splits: the other one of each kind is a long proof
        pytest.param(kind, found[0], part, marks=[] if (kind, part) in QUICK else pytest.mark.slow)
        for kind, found in OF_ANYBODY.items()
        for part in PARTS[1:]
    ),
]


@pytest.mark.parametrize(("kind", "defense", "part"), CASES)
def test_a_peer_that_picks_its_rows_observes_no_label(
    tmp_path: Path, kind: str, defense: str, part: str
) -> None:
    active = [defense, "leak_monitor=null"]
    assert_same_for_both_labels(tmp_path, kind, part, active, [BY_COLUMN])


@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_it_where_each_row_is_sent_once(tmp_path: Path, kind: str) -> None:
    both = [BY_COLUMN, ONE_SHOT]
    undefended = ["defense={name: none}", "leak_monitor=null"]
    assert_same_for_both_labels(tmp_path / "none", kind, "train", undefended, both)
    both += [NOISY, f"contract.scores={2 if kind == 'several classes' else 1}"]
    assert_same_for_both_labels(tmp_path / "noisy", kind, "train", [GAUSSIAN], both)


FURTHER: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "split by hash": ("two classes", [RESPONSE], []),
    "a monitor": ("two classes", [RESPONSE], [BY_COLUMN]),
    "class weights": ("several classes", [RESPONSE, "data.class_weights=[1, 2, 3]"], [BY_COLUMN]),
    "a budget": ("numbers", [GAUSSIAN, "run_budget={leak_auc: 0.7}"], [BY_COLUMN]),
    "a budget that ends the run": (
        "two classes",
        [RESPONSE, "run_budget={leak_auc: 0.6}"],
        [BY_COLUMN],
    ),
}


@pytest.mark.parametrize("case", FURTHER)
def test_nor_does_it_with_a_leak_monitor_and_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(Operations, "counts_calls", False)
    monkeypatch.setattr(leak_recorder, "_COPYING", 0)
    kind, active, both = FURTHER[case]
    end = "BudgetExhausted" if "ends" in case else "finished"
    part = "train" if BY_COLUMN in both else ""
    assert_same_for_both_labels(tmp_path, kind, part, active, both, end)


def test_no_call_waits_for_attacks_whose_time_depends_on_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are held until the peer has all answers, and has gone back to checkpoints twice."""
    write_example(tmp_path)
    over, in_time = threading.Event(), list[bool]()
    observe = LeakAudit.observe

    def held(self: LeakAudit, observation: Observation) -> AuditedBatch | None:
        in_time.append(over.wait(HANGS_AFTER_S))
        return observe(self, observation)

    monkeypatch.setattr(LeakAudit, "observe", held)
    monkeypatch.setattr(AuditWorker, "wait_until_idle", lambda *_: pytest.fail("it waits"))
    attacks = "hint_distance_5, nearest_hint, kmeans_hint, mean, median, lda"
    own = [*SMALL, GAUSSIAN, f"leak_monitor.attacks=[{attacks}]"]
    first = build_parties(tmp_path, own, runs=tmp_path / "runs")
    with ActiveRecorder(first.active_settings, tmp_path) as recorder:
        first.session.lifecycle.observer = recorder
        ends = []
        for goes_at in (13, 6, 0):
            parties = build_parties(
                tmp_path, own, [*SMALL, "adversary=null"], runs=tmp_path / "runs"
            )
            parties.session = first.session
            ends.append(ending(parties, dying(goes_at, after=True)))
        assert ends == ["Lost ", "Lost ", "finished"]
        over.set()
    assert in_time
    assert all(in_time)


def test_nor_does_either_of_two_peers(tmp_path: Path) -> None:
    runs, released = [], list[Any]()
    for other in (False, True):
        folder = tmp_path / str(other)
        write_several(folder, 2, rows=200)
        lines = (folder / "active.csv").read_text().splitlines()
        negative = [line.split(",")[0] for line in lines[1:] if line.split(",")[1] == "0"]
        for party in ("ash", "birch"):
            header, *rows = (folder / f"{party}.csv").read_text().splitlines()
            picked = [row for row in rows if row.split(",")[0] in negative]
            (folder / f"{party}.csv").write_text("\n".join([header, *picked]) + "\n")
        if other:
            text = "\n".join(lines).replace(f"{negative[20]},0", f"{negative[20]},1")
            (folder / "active.csv").write_text(text + "\n")
        with releasing(released, again=other):
            runs.append(seen_by_several(folder))
    assert released
    assert runs[0].keys() == {"ash", "birch"}
    assert runs[0] == runs[1]


# ---- the comparison would notice ----


def test_a_check_of_the_aligned_rows_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TrainerBuilder.__call__

    def checked(self: TrainerBuilder, rows: AlignedRows) -> TopTrainer:
        trainer = build(self, rows)
        if len(set(trainer.labels_of(rows.splits["test"]).tolist())) == 1:
            raise DataError("the test rows hold one class only")
        return trainer

    monkeypatch.setattr(TrainerBuilder, "__call__", checked)
    with pytest.raises(AssertionError, match=r"^aligned"):
        assert_same_for_both_labels(
            tmp_path, "two classes", "test", [RESPONSE], [BY_COLUMN], "DataError"
        )


def test_work_that_depends_on_labels_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = TopTrainer.learn

    def unevenly(self: TopTrainer) -> None:
        if self._labels.any():
            torch.zeros(1)
        learn(self)

    monkeypatch.setattr(TopTrainer, "learn", unevenly)
    active = [RESPONSE, "leak_monitor=null"]
    with pytest.raises(AssertionError, match=r"aten\.zeros"):
        assert_same_for_both_labels(tmp_path, "two classes", "", active, [])
