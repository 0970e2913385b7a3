"""The verdict on a run, in plain words, computed from its figures.

It describes what was recovered, what the ledger allows for, and what was not examined. A measured
figure is a lower bound on the leak (another attack may do better), and the ledger's bounds are
upper bounds, each for the peers whom its charges describe. The one for anybody is its guarantee.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from splitveil.active_party.report.bounds import (
    beyond_of,
    bounds_of,
    contradictions,
    guarantee_of,
    in_short,
    measured_of,
    reveals_something,
)
from splitveil.active_party.report.figures import Finding, strongest
from splitveil.active_party.report.run_files import RunFiles
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import (
    ATTACKS,
    RUN_ATTACKS,
    WITHOUT_GRADIENTS,
    SideInformation,
)
from splitveil.common.record.figures import AdjustedFigures, BeyondFigures, is_clearly_above
from splitveil.common.text.upper_bounds import auc_at_most

Level = Literal["recovered", "leaking", "unbounded", "bounded", "unknown"]

RECOVERED = 0.9
"""Leak AUC at and above which labels count as recovered."""
WEAK_GUARANTEE = 0.9
"""Guarantee above which a ledger's bound is meaningless in practice."""
BITS_PER_AUDIT = math.log2(51)
"""The reply to an audit is one of .50, .51, ..., 1.00."""

LEVELS: Mapping[Level, str] = {
    "recovered": "Labels recovered",
    "leaking": "Labels leak in part",
    "unbounded": "No leak measured, none excluded",
    "bounded": "No leak measured, and little possible",
    "unknown": "Nothing measured",
}


class _Need(NamedTuple):
    """Something that an attacker must know besides the gradients."""

    words: str
    is_free: bool = False
    """Whether every passive party knows it or can guess it."""
    is_oracle: bool = False

    def in_words(self) -> str:
        return f"{self.words} (evaluation only)" if self.is_oracle else self.words


def _needs(kinds: frozenset[SideInformation], labels: str | None = None) -> frozenset[_Need]:
    known = {_Need(kind.words, kind.is_free, kind.is_oracle) for kind in kinds}
    return frozenset(known if labels is None else {*known, _Need(labels)})


_OF_UNKNOWN = frozenset({_Need("what that attack is given")})
"""The needs of a user-defined attack: it cannot be assumed to work without labels."""

_NEEDS: Mapping[str, frozenset[_Need]] = {
    **{str(name): _needs(attack.needs) for name, attack in ATTACKS.items()},
    **{str(name): _needs(attack.needs, attack.labels) for name, attack in RUN_ATTACKS.items()},
}


class RunLevel(NamedTuple):
    """One attack on the gradients of all epochs together."""

    layer: str
    attack: str
    leak_auc: float
    low: float | None
    high: float | None
    examples: int | None
    """The number of examples scored; None if the run did not record it."""
    tpr_at_per_mille: float | None = None
    """Share of the positives found while at most 0.1 % of the negatives are accused."""
    tpr_at_percent: float | None = None
    precision_at_100: float | None = None
    """Share of positives among the 100 highest scores."""


@dataclass(frozen=True)
class Verdict:
    """A judgement on a run; its reasons are in words on the page."""

    level: Level
    headline: str
    doubts: list[str] = field(default_factory=list)
    """Sentences about figures that contradict the ledger."""
    with_features: str = ""
    """What the strongest attack on numbers explains, features included."""
    in_few_words: str = ""
    """What the badge says, if not the words of the level."""

    @property
    def badge(self) -> str:
        """The level in a few words."""
        return self.in_few_words or LEVELS[self.level]


def needs_of(attack: str) -> str:
    """Describe the side information that an attacker needs besides the gradients."""
    if attack not in _NEEDS:
        return "not known here"
    return "; ".join(sorted(need.in_words() for need in _NEEDS[attack])) or "nothing"


def is_oracle(attack: str) -> bool:
    """Return whether an attack uses knowledge that only an evaluation has."""
    return any(need.is_oracle for need in _NEEDS.get(attack, frozenset()))


def run_levels(run: RunFiles) -> list[RunLevel]:
    found: dict[tuple[str, str], RunLevel] = {}
    for party in run.parties:
        for name, attacks in party.summary.of_leak.run_level.items():
            for attack, figures in attacks.items():
                one = RunLevel(party.layer(name), attack, *figures)
                found.setdefault((one.layer, one.attack), one)
    return list(found.values())


def judge(run: RunFiles, findings: Sequence[Finding], accumulated: Sequence[RunLevel]) -> Verdict:
    """Judge a run by the success of its attacks and by the bounds of its ledger."""
    bounds = bounds_of(run)
    findings = [found for found in findings if found.attack not in WITHOUT_GRADIENTS]
    accumulated = [one for one in accumulated if one.attack not in WITHOUT_GRADIENTS]
    figures, adjusted = beyond_of(run), measured_of(run).adjusted
    # What an attack reaches at an earlier layer follows from the cut's gradients and from features,
    # so that its raw figure contradicts no bound where the adjusted one at the cut does not.
    unadjusted = [one for one in accumulated if one.attack not in adjusted]
    doubts = list(_doubts(run.active.summary.of_active.leak_alarms, unadjusted, bounds))
    doubts += contradictions(run, bounds)
    bounded = guarantee_of(run) <= WEAK_GUARANTEE and not doubts
    if not adjusted:
        raw = [found.mean for found in findings] + [one.leak_auc for one in accumulated]
        leaks = any(one.beats_chance for one in findings) or any(map(_above_chance, accumulated))
        level = _level(raw, leaks=leaks, bounded=bounded) if raw else "unknown"
        return Verdict(level, _headline(findings, accumulated, bounds), doubts)
    strongest_beyond = figures.strongest()
    said = (
        "The rows are too few to say what attacks tell beyond features"
        if strongest_beyond is None
        else _headline_beyond(figures, strongest_beyond[0])
    )
    values = [found.value for found in figures.adjusted.values()]
    level = _level(values, leaks=reveals_something(figures), bounded=bounded)
    return Verdict(level, f"{said}; {in_short(bounds)}.", doubts)


def _headline_beyond(figures: BeyondFigures, strongest_attack: str) -> str:
    recovering = {n: one for n, one in figures.adjusted.items() if one.value >= RECOVERED}
    easiest = max(
        recovering, key=lambda name: _ease(name, recovering[name]), default=strongest_attack
    )
    found = figures.adjusted[easiest]
    if recovering:
        return (
            f"Anyone who keeps the gradients of this run{_and_knows(easiest)} recovers the labels: "
            f"AUC {found.value:.3f} among examples that features predict alike"
        )
    if is_clearly_above(found, 0.5):
        return (
            f"Beyond the features, gradients reveal something about the labels: {easiest} "
            f"reaches AUC {found.value:.3f} among examples that features predict alike"
        )
    return (
        "No attack that was run tells more of the labels than features do: the strongest reaches "
        f"AUC {found.value:.3f} among examples that features predict alike, where chance gives "
        "about 0.5"
    )


def _ease(attack: str, found: AdjustedFigures) -> tuple[bool, float]:
    return not _more_than_free(attack), found.value


def _level(figures: Sequence[float], *, leaks: bool, bounded: bool) -> Level:
    if max(figures, default=0.0) >= RECOVERED:
        return "recovered"
    if leaks:
        return "leaking"
    return "bounded" if bounded else "unbounded"


def _headline(
    findings: Sequence[Finding],
    accumulated: Sequence[RunLevel],
    bounds: Mapping[Adversary, float],
) -> str:
    whole_run = highest(accumulated)
    easiest = highest([one for one in accumulated if not _more_than_free(one.attack)])
    for one in (easiest, whole_run):
        if one is not None and one.leak_auc >= RECOVERED:
            return (
                f"Anyone who keeps the gradients of this run{_and_knows(one.attack)} recovers the "
                f"labels with AUC {one.leak_auc:.3f}."
            )
    by_anyone = strongest([found for found in findings if not _more_than_free(found.attack)])
    if by_anyone is not None and by_anyone.mean >= RECOVERED:
        return (
            f"Anyone who keeps these gradients recovers the labels with AUC {by_anyone.mean:.3f}."
        )
    best = strongest(findings)
    if best is None:
        return "No attack was run: it is not known how much these gradients reveal."
    if best.mean >= RECOVERED:
        return (
            f"Anyone who keeps these gradients{_and_knows(best.attack)} recovers the labels with "
            f"AUC {best.mean:.3f}."
        )
    if best.beats_chance or any(found.beats_chance for found in findings):
        said = (
            f"Single batches reveal something about the labels (AUC {best.mean:.3f}, where "
            f"chance gives {best.random_mean:.3f})"
        )
    else:
        said = "No attack that was run did better than chance on single batches"
    if whole_run is not None:
        said += f", and all epochs together reach AUC {whole_run.leak_auc:.3f}"
    return f"{said}; {in_short(bounds)}."


def _doubts(
    alarms: int | None, accumulated: Sequence[RunLevel], bounds: Mapping[Adversary, float]
) -> Iterator[str]:
    """Yield the evidence against the ledger's figures."""
    if alarms:
        yield (
            f"The leak alarm went off {alarms} time{'s' * (alarms > 1)}: an attack measured more "
            "than the ledger states for one answer, so its figures do not describe these "
            "gradients."
        )
    for one in accumulated:
        passed = [p for p, bound in bounds.items() if one.low is not None and one.low > bound]
        if passed:
            widest = passed[0]
            yield (
                f"{one.attack} at layer {one.layer} measured {one.leak_auc:.3f} over the whole "
                f"run, more than the {auc_at_most(bounds[widest])} that the ledger states for "
                f"{widest.in_words}: that bound does not describe this attack on these gradients."
            )


def _more_than_free(attack: str) -> list[_Need]:
    return sorted(need for need in _NEEDS.get(attack, _OF_UNKNOWN) if not need.is_free)


def _and_knows(attack: str) -> str:
    known = " and ".join(need.words for need in _more_than_free(attack))
    return f" and knows {known}" if known else ""


def highest(accumulated: Sequence[RunLevel]) -> RunLevel | None:
    return max(accumulated, key=lambda one: one.leak_auc, default=None)


def _above_chance(one: RunLevel) -> bool:
    return one.low is not None and one.low > 0.5


def listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
