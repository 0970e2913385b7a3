"""Audits the gradients of any trainer: what a receiving peer can learn about the labels."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.errors import SettingsError
from splitveil.common.privacy.attacks import (
    ATTACKS,
    BUILT_IN_NAMES,
    CUT,
    RUN_ATTACKS,
    Attack,
    SideInformation,
)
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.figures import BeyondFigures, EpsilonBound, RunFigures
from splitveil.common.privacy.gradient_rows import Gradients
from splitveil.common.privacy.leakage import leak_auc_interval
from splitveil.common.privacy.observation import LabelClasses, Observation, score_batch
from splitveil.common.privacy.run_level import aucs_of, run_level_leak
from splitveil.common.privacy.stored_row_attacks import (
    STORED_ROW_ATTACKS,
    Received,
    attack_stored_rows,
)
from splitveil.common.text.wording import at_least, suggest
from splitveil.library.frames import Frame, Row, Tabular, frame


class AuditedRows(NamedTuple):
    """The rows in the order they were sent."""

    gradients: Tensor
    labels: Tensor
    starts: npt.NDArray[np.int64]
    """First row of each batch, and the number of rows."""
    positions: npt.NDArray[np.int64]
    """Which example each row is about, from 0."""
    activations: Tensor | None

    @classmethod
    def of(
        cls, gradients: Any, labels: Any, batches: Any, examples: Any, activations: Any
    ) -> "AuditedRows":
        """Check the arguments of ``audit``; ValueError if they do not fit, or are not finite."""
        of_labels = _tensor(labels, "labels").reshape(-1)
        rows = len(of_labels)
        if not rows:
            raise ValueError("labels: expected at least one row")
        sent = _of_rows(gradients, "gradients", rows)
        own = None if activations is None else _of_rows(activations, "activations", rows)
        starts = _starts(batches, rows)
        positions = np.arange(rows)
        if examples is not None:
            named = np.asarray(examples).reshape(-1)
            if len(named) != rows:
                raise ValueError(f"examples: expected {rows}, got {len(named)}")
            positions = np.unique(named, return_inverse=True)[1].astype(np.int64)
        for start, end in itertools.pairwise(starts):
            if len(np.unique(positions[start:end])) < end - start:
                raise ValueError("examples: expected each at most once in a batch; see batches")
        return cls(sent, of_labels, starts, positions, own)

    @property
    def num_examples(self) -> int:
        return int(self.positions.max()) + 1

    def attack_as_stored(self, attack: str, classes: LabelClasses) -> RunFigures | None:
        """Run one of `STORED_ROW_ATTACKS`; None if no two classes have examples that it scores."""
        own = self.gradients if self.activations is None else self.activations
        labels = np.zeros(self.num_examples, dtype=np.int64)
        labels[self.positions] = self.labels.numpy()
        positions = torch.from_numpy(self.positions)
        received = Received(self.gradients, own, positions, self.starts)
        scores = attack_stored_rows(attack, received, labels, classes)
        return run_level_leak(scores, aucs_of(scores, labels, classes), labels, classes)

    def observations(self) -> Iterator[Observation]:
        """Yield the batches; a batch with an example that was seen before begins an epoch."""
        epoch, seen = 0, np.zeros(self.num_examples, dtype=bool)
        first = 0
        for number, (start, end) in enumerate(itertools.pairwise(self.starts)):
            rows = slice(int(start), int(end))
            positions = self.positions[rows]
            if seen[positions].any():
                epoch, first = epoch + 1, number
                seen[:] = False
            seen[positions] = True
            yield Observation(
                epoch,
                number - first,
                {CUT: self.gradients[rows]},
                self.labels[rows],
                positions=torch.from_numpy(positions),
                activations=None if self.activations is None else self.activations[rows],
                references_are_clean=False,  # they are among the gradients that were sent
            )

    def covariates(self, covariates: Any, predictions: Any) -> Covariates:
        """Return each example's covariates, from the last row about it."""
        last = np.zeros(self.num_examples, dtype=np.int64)
        last[self.positions] = np.arange(len(self.positions))
        rows = len(self.positions)

        def values(given: Any, name: str) -> npt.NDArray[np.float32]:
            if given is None:
                return np.zeros((len(last), 0), dtype=np.float32)
            found = _of_rows(given, name, rows).reshape(rows, -1).numpy()[last]
            return found.astype(np.float32)

        return Covariates(
            np.arange(len(last)),
            values(covariates, "covariates"),
            values(predictions, "predictions"),
            np.zeros((len(last), 0), dtype=np.float32),
            self.labels.numpy()[last].astype(np.int64),
        )


def _tensor(values: Any, name: str) -> Tensor:
    tensor = values.detach().cpu() if isinstance(values, Tensor) else None
    if tensor is None:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name}: expected numbers, got {array.dtype}")
        tensor = torch.from_numpy(np.array(array))
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: expected finite numbers")
    return tensor


def _of_rows(values: Any, name: str, rows: int) -> Tensor:
    tensor = _tensor(values, name)
    if not tensor.ndim or len(tensor) != rows:
        raise ValueError(f"{name}: expected {rows} rows, got shape {tuple(tensor.shape)}")
    tensor = tensor if tensor.is_floating_point() else tensor.double()
    return tensor.reshape(rows, -1) if tensor.ndim == 1 else tensor


def _starts(batches: Any, rows: int) -> npt.NDArray[np.int64]:
    if batches is None:
        return np.array([0, rows])
    if isinstance(batches, int):
        if batches < 1:
            raise ValueError(f"batches: expected a size of at least 1, got {batches}")
        return np.unique([*range(0, rows, batches), rows]).astype(np.int64)
    numbers = np.asarray(batches).reshape(-1)
    if len(numbers) != rows or (np.diff(numbers) < 0).any():
        raise ValueError(f"batches: expected {rows} ascending numbers, or a size")
    return np.array([0, *(np.flatnonzero(np.diff(numbers)) + 1), rows])


Part = Literal["adjusted", "batches", "run"]

_SEED = b"an audit of gradients from elsewhere"
"""Decides which examples the attacks know; a fixed one makes audits repeatable."""
_OF_EPSILON = ("epsilon", "attack", "guesses", "correct", "pairs", "confidence", "delta")


class AttackOnBatches(NamedTuple):
    """One attack on single batches."""

    attack: str
    leak_auc: float
    """Mean over the batches."""
    low: float
    """Lower end of its 95 % interval; not a number if there is none."""
    high: float
    q95: float
    """95 % quantile over the batches."""
    random: float
    """Mean of random scores on the same batches, which is above 1/2."""
    batches: int
    needs: str
    """Knowledge that the attack needs besides the gradients."""
    is_oracle: bool
    """True if no peer has this knowledge."""


@dataclass(frozen=True, repr=False)
class Audit(Tabular):
    """The measured leakage of labels through gradients."""

    rows: int
    batches: tuple[AttackOnBatches, ...]
    run: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Attacks over all batches together: leak AUC with its interval."""
    beyond: BeyondFigures | None = None
    """Leakage beyond covariates; None without covariates, or for too few rows."""
    skipped_one_class: int = 0
    """Batches of a single class, which have no AUC."""

    @property
    def epsilon(self) -> EpsilonBound | None:
        """The largest epsilon of label differential privacy that the attacks exclude."""
        return None if self.beyond is None else self.beyond.epsilon

    @property
    def strongest(self) -> tuple[str, float]:
        """The attack with the largest leak AUC, and that AUC.

        Compares the AUCs beyond the covariates, or without covariates the raw ones, of batches or
        over all batches.

        Raises:
            ValueError: none was measured.
        """
        if self.beyond is not None and self.beyond.adjusted:
            adjusted = self.beyond.adjusted
            attack = max(adjusted, key=lambda name: adjusted[name].value)
            return attack, adjusted[attack].value
        found = [(one.attack, one.leak_auc) for one in self.batches]
        found += [(attack, one["auc"]) for attack, one in self.run.items()]
        if not found:
            raise ValueError("no attack was measured: every batch is of a single class")
        return max(found, key=lambda one: one[1])

    def frame(self, of: Part | None = None) -> Frame:
        """Return the figures, one row per attack, as a data frame (else a ``pyarrow.Table``).

        Args:
            of: ``adjusted`` for what attacks reveal beyond the covariates; the raw leak AUCs, which
                contain what covariates reveal: ``batches`` for attacks on single batches, ``run``
                for those over all of them. By default the adjusted ones, where there are any.

        Raises:
            ValueError: there is no such kind of frame.
        """
        return frame(self.table(of))

    def table(self, of: Part | None = None) -> list[Row]:
        """Return the rows of a frame as mappings, column -> value; errors as for ``frame``."""
        if of is None:
            of = "adjusted" if self.beyond is not None and self.beyond.adjusted else "batches"
        if of == "batches":
            return [one._asdict() for one in self.batches]
        if of == "run":
            return [{"attack": attack, **one} for attack, one in self.run.items()]
        if of == "adjusted":
            adjusted = {} if self.beyond is None else self.beyond.adjusted
            return [{"attack": attack, **one._asdict()} for attack, one in adjusted.items()]
        raise ValueError(f"expected one of {', '.join(get_args(Part))}, got {of!r}")

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        epsilon, beyond = self.epsilon, self.beyond
        return {
            "rows": self.rows,
            "skipped_one_class": self.skipped_one_class,
            "adjusted_rows": None if beyond is None else beyond.rows,
            "feature_auc": None if beyond is None else beyond.feature_auc,
            **{part: self.table(part) for part in get_args(Part)},
            "epsilon_lower_bound": None
            if epsilon is None
            else {name: getattr(epsilon, name) for name in _OF_EPSILON},
        }

    def _table(self) -> tuple[str, Sequence[Row], str]:
        adjusted = {} if self.beyond is None else self.beyond.adjusted
        rows = [
            _row(attack, "beyond covariates, 99.99 %", one.value, one.low, one.high)
            for attack, one in adjusted.items()
        ]
        rows += [
            {
                **_row(
                    one.attack, f"batches ({one.batches:,}), raw", one.leak_auc, one.low, one.high
                ),
                "random": one.random,
                "needs to know": one.needs,
            }
            for one in self.batches
        ]
        rows += [
            _row(attack, "all batches, raw", one["auc"], one["low"], one["high"])
            for attack, one in self.run.items()
        ]
        notes = [] if rows else ["no attack was measured"]
        if (found := self.epsilon) is not None:
            notes.append(
                f"epsilon of label differential privacy is at least {at_least(found.epsilon)} "
                f"(confidence {found.confidence:g}, delta {found.delta:g}): {found.attack} "
                f"guessed {found.correct:,} of {found.guesses:,} labels right"
            )
        if self.skipped_one_class:
            notes.append(f"{self.skipped_one_class:,} batches of a single class were left out")
        return f"Audit of {self.rows:,} rows: leak AUC, 0.5 is guessing", rows, "; ".join(notes)


def _row(attack: str, over: str, auc: float, low: float, high: float) -> Row:
    interval = "-" if math.isnan(low) else f"{low:.3f} to {min(high, 1.0):.3f}"
    figures = {"attack": attack, "over": over, "leak AUC": auc, "interval": interval}
    return {**figures, "random": "-", "needs to know": "-"}


def audit(
    gradients: Any,
    labels: Any,
    *,
    batches: Any = None,
    examples: Any = None,
    activations: Any = None,
    covariates: Any = None,
    predictions: Any = None,
    attacks: Sequence[str] | None = None,
    custom: Mapping[str, Callable[..., Tensor]] = MappingProxyType({}),
) -> Audit:
    """Attack gradients that a trainer has sent, and measure what they reveal about the labels.

    All arrays have one entry per row, in the order the rows were sent; tensors, arrays and lists
    are accepted.

    Args:
        gradients: as sent, (rows, ...).
        labels: 0 and 1, or whole numbers from 0, (rows,).
        batches: the number of each row's batch, ascending, (rows,), or the size of all batches but
            the last. By default all rows are one batch.
        examples: which example each row is about, (rows,), each at most once per batch: attacks
            over several epochs need it. By default every row is an example of its own.
        activations: the peer's own activations, (rows, ...), for attacks that look at them.
        covariates: what else the peer knows about each row, such as its features, (rows, values).
            With them, leak AUCs are also measured among rows with equal predictions from them, and
            a lower bound on epsilon is found. They must not have memorised the rows' labels.
        predictions: the model's predictions, (rows,) or (rows, classes), as further covariates.
        attacks: names; by default all that these arrays suffice for, without those in
            `attacks.ON_STORED_ROWS`, which take minutes and need ``examples`` and ``activations``.
        custom: further attacks by name: functions of a batch's gradients that return one score per
            row.

    Returns:
        Leak AUCs of every attack, with 95 % intervals.

    Raises:
        ValueError: shapes do not fit, a value is not finite, or a label is not a class.
        SettingsError: there is no such attack, or it needs something that is missing.
    """
    given = AuditedRows.of(gradients, labels, batches, examples, activations)
    largest = int(given.labels.max())
    classes = LabelClasses(tuple(map(str, range(largest + 1))) if largest > 1 else ())
    classes.indices(given.labels)
    own = {name: Attack(partial(_scored, score)) for name, score in custom.items()}
    known = _known(given, has_examples=examples is not None)
    chosen = [*known, *own] if attacks is None else [*attacks, *own]
    of_stored = () if examples is None or activations is None else STORED_ROW_ATTACKS
    _check(chosen, {*known, *own, *of_stored})
    found = LeakAudit(
        chosen, num_examples=given.num_examples, labels=classes, custom=own,
        keeps_scores=covariates is not None or predictions is not None,
    )  # fmt: skip
    measured: dict[str, list[float]] = {}
    random: list[float] = []
    for observation in given.observations():
        seen = replace(
            observation, clues=found.clues(observation, _SEED, {CUT: observation.gradients[CUT]})
        )
        leak = found.observe(seen)
        if leak is not None:
            random.append(leak.random)
            for attack, auc in leak.leak[CUT].items():
                measured.setdefault(attack, []).append(auc)
    found.run.close_epoch()
    on_stored = {
        name: given.attack_as_stored(name, classes) for name in chosen if name in STORED_ROW_ATTACKS
    }
    needs = {str(name): one for name, one in ATTACKS.items()} | own
    only = _only(given, found, classes, needs) if len(random) == 1 else {}
    return Audit(
        rows=len(given.labels),
        batches=tuple(
            _summary(attack, aucs, random, needs[attack], only.get(attack))
            for attack, aucs in measured.items()
        ),
        run={
            name: {key: one for key, one in leak._asdict().items() if key != "over_features"}
            for name, leak in (*found.run.result()[0].get(CUT, {}).items(), *on_stored.items())
            if leak is not None
        },
        beyond=None
        if covariates is None and predictions is None
        else found.beyond_features(given.covariates(covariates, predictions)),
        skipped_one_class=found.counts().skipped_one_class or 0,
    )


def _known(given: AuditedRows, *, has_examples: bool) -> list[str]:
    missing = {SideInformation.PREDICTIONS}  # only the model's own trainer has them
    if given.activations is None:
        missing.add(SideInformation.ACTIVATIONS)
    on_batches = [str(name) for name, one in ATTACKS.items() if missing.isdisjoint(one.needs)]
    over_runs = [str(name) for name, one in RUN_ATTACKS.items() if missing.isdisjoint(one.needs)]
    return [*on_batches, *over_runs] if has_examples else on_batches


def _check(chosen: Sequence[str], known: set[str]) -> None:
    for name in chosen:
        if name in known:
            continue
        if name not in {*BUILT_IN_NAMES, *STORED_ROW_ATTACKS}:
            hint = suggest(name, [*BUILT_IN_NAMES, *STORED_ROW_ATTACKS])
            raise SettingsError(f"attacks: there is no attack {name!r}{hint}")
        raise SettingsError(
            f"attacks: {name} needs more than it was given: examples for attacks over several "
            f"batches, activations for those that look at them"
        )


def _summary(
    attack: str,
    aucs: Sequence[float],
    random: Sequence[float],
    table: Attack,
    only: tuple[float, float] | None,
) -> AttackOnBatches:
    mean, count = float(np.mean(aucs)), len(aucs)
    low = high = math.nan
    if only is not None:
        low, high = only
    elif count > 1:
        # Importing it takes time that only an audit should pay.
        from scipy.stats import t  # noqa: PLC0415

        reach = float(t.ppf(0.975, count - 1)) * float(np.std(aucs, ddof=1)) / count**0.5
        low, high = mean - reach, mean + reach
    return AttackOnBatches(
        attack,
        mean,
        low,
        high,
        float(np.quantile(aucs, 0.95)),
        float(np.mean(random)),
        count,
        ", ".join(sorted(need.words for need in table.needs)) or "nothing",
        table.is_oracle,
    )


def _only(
    given: AuditedRows, found: LeakAudit, classes: LabelClasses, attacks: Mapping[str, Attack]
) -> dict[str, tuple[float, float]]:
    """Return the bootstrap intervals of attacks on an only batch of two classes."""
    intervals: dict[str, tuple[float, float]] = {}
    if classes.is_multi_class:
        return intervals
    for observation in given.observations():
        if not classes.is_mixed(classes.indices(observation.labels)):
            continue
        sent = {CUT: observation.gradients[CUT]}
        seen = replace(observation, clues=found.clues(observation, _SEED, sent))
        labels = classes.indices(observation.labels)
        scored = score_batch(attacks, classes.targets, seen, labels)[CUT].scores
        for name, (by_target, left_out) in scored.items():
            if by_target[0] is None:
                continue
            kept = np.ones(len(labels), dtype=bool)
            kept[list(left_out[0])] = False
            of_kept = labels.numpy()[kept]
            if len(np.unique(of_kept)) == 2:
                scores = by_target[0].numpy()[kept]
                measured = leak_auc_interval(scores, of_kept, np.random.default_rng(0))
                intervals[name] = (measured.low, measured.high)
    return intervals


def _scored(score: Callable[..., Tensor], gradients: Gradients) -> Tensor:
    rows = gradients if isinstance(gradients, Tensor) else gradients.gradients
    return torch.as_tensor(score(rows)).double().reshape(-1)
