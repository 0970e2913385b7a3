"""Renders the passive party's report from the files in its folder of a run."""

import argparse
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from splitveil.common.errors import SettingsError
from splitveil.common.party import report_parts
from splitveil.common.party.arguments import print_json
from splitveil.common.party.cover import COVER, CheckAnswer, ended_early_by, was_sent, write_cover
from splitveil.common.record.run_folder import write_json_atomically, write_text_atomically
from splitveil.common.record.run_record import METRICS, Summary, find_summary, read_metrics, text_of
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.values import as_mapping
from splitveil.common.text.wording import bytes_in_words
from splitveil.common.text.yaml_text import RESOLVED, load_yaml
from splitveil.passive_party.feature_exposure import (
    LEAST_ROWS,
    FeatureExposure,
    Kind,
    exposure_from_json,
    exposure_to_json,
)
from splitveil.passive_party.information_value import SMALL_LOSS

logger = logging.getLogger("splitveil.passive_party")

EXPOSURE = "exposure.json"

_PACKAGE = "splitveil.passive_party"
_MOST_BARS = 10

_GUESSED: Mapping[Kind, str] = {
    "number": "which of four equal-sized ranges it lies in,",
    "gap": "it",
    "category": "it",
    "list": "whether one of its categories is there",
}

_ELSEWHERE = "See the label owner's cover page."
_NO_COLUMNS = report_parts.ScaleRow("Columns: not measured", "muted", said="Not measured.")
_NOTHING_OF_COLUMNS = report_parts.ScaleRow(
    "Columns: 0, nothing of them was sent",
    "estimate",
    0.0,
    0.0,
    said="Nothing that was sent depends on one but the ids.",
)
_NO_LABELS = report_parts.ScaleRow(
    "Labels: 0, nothing that we got depends on one",
    "guarantee",
    0.0,
    0.0,
    said="Nothing that was sent depends on one.",
)
# The strength of a defense is private, and what this party's adversary finds depends on labels.
_SOME_LABELS = report_parts.ScaleRow(
    "Labels: see the label owner's cover page", "muted", said=_ELSEWHERE
)
_MODEL = report_parts.ScaleRow("Model: see the label owner's cover page", "muted", said=_ELSEWHERE)

# What each kind of message that this party sends contains.
_CONTENT: Mapping[str, str] = {
    "Handshake request": "the contract, field by field",
    "Align request": "ids, blinded by a secret of this party",
    "Train request": "activations of training rows",
    "Evaluate request": "activations of held-out rows",
    "Leave request": "how this party's part ended",
    "Describe request": "questions about the model that is served",
    "Embed reply": "activations of rows asked for by id",
    "EmbedTable reply": "encrypted activations of the whole table",
}
_CONTENT_ONE_SHOT: Mapping[str, str] = {
    "Train request": "messages of the oblivious transfer that yields noisy sums",
    "Evaluate request": "activations of all rows",
}
# What the page's own sentences name.
_NAMED = ("activations of", "ids, blinded", "the contract", "how this party")


class Assessment(NamedTuple):
    style: str
    word: str
    headline: str
    next_step: str
    price: str


def report(parsed: argparse.Namespace) -> None:
    written = write_passive_report(parsed.run_dirs[0], parsed.output)
    if parsed.json:
        print_json({"report": str(written)})
    logger.info("report written to %s", written)


def write_exposure(folder: Path, exposure: FeatureExposure) -> None:
    write_json_atomically(folder / EXPOSURE, exposure_to_json(exposure))


def write_passive_report(folder: Path, output: Path | None = None) -> Path:
    folder = folder / "passive" if (folder / "passive" / METRICS).is_file() else folder
    settings = as_mapping(
        load_yaml(text_of(folder / "settings.yaml") or "{}", str(folder), RESOLVED)
    )
    if not (folder / METRICS).is_file() or "bottom_model" not in settings:
        raise SettingsError(f"{folder}: expected a passive party's folder of a run")
    exposure, summary = read_exposure(folder), find_summary(folder) or Summary()
    traffic, most = report_parts.read_traffic(folder), settings.get("max_exposure")
    contract = as_mapping(settings.get("contract"))
    one_shot = contract.get("exchange") == "one_shot"
    one_sided = as_mapping(contract.get("alignment")).get("kind") == "one_sided"
    ended_by = ended_early_by(folder)
    of_columns, of_labels = was_sent(contract, None if ended_by is None else traffic)
    if not of_columns:
        exposure = None
    assessment = _assessment(exposure, "is" if one_sided else "was", most)
    if ended_by is not None:
        said = assessment.headline if of_columns else "Nothing of our columns was sent."
        assessment = assessment._replace(
            style="unknown" if assessment.style == "within" else assessment.style,
            word="Ended early",
            headline=f"The run ended early, by {ended_by}. {said}",
        )
    figures = {
        "columns": (_NO_COLUMNS if of_columns else _NOTHING_OF_COLUMNS)
        if exposure is None
        else report_parts.columns_row(exposure.disclosure, exposure.strongest_disclosure, most),
        "labels": _SOME_LABELS if of_labels else _NO_LABELS,
    }
    if output is None:  # the pages name each other by their places
        write_cover(
            folder,
            str(settings.get("party", "passive")),
            settings,
            summary,
            (
                assessment.style,
                assessment.word,
                assessment.headline
                if ended_by
                else f"{figures['columns'].said.partition('.')[0]}.",
            ),
            {**figures, "model": _MODEL},
            {"limit": _within_limit(exposure, most, was_sent=of_columns)},
        )
    peer = "a process on this machine, in plain text (nobody was authenticated)"
    if as_mapping(settings.get("security")).get("mode") == "mtls":
        identity = as_mapping(contract.get("identities")).get(ACTIVE, f"{ACTIVE}.splitveil")
        peer = f"{identity} (by its certificate, over TLS 1.3)"
    columns = () if exposure is None else exposure.columns
    crossed = report_parts.traffic_rows(traffic, ACTIVE)
    content = {**_CONTENT, **(_CONTENT_ONE_SHOT if one_shot else {})}
    if contract.get("release") == "noisy_labels":
        content = {**content, "Train request": "the contract's request for noisy labels"}
    left = {content.get(one.kind, one.kind) for one in crossed if one.direction == "sent"}
    page = report_parts.render(
        _PACKAGE,
        "passive.html.jinja",
        title=f"{contract.get('run_name', folder.name)}",
        party=str(settings.get("party", "passive")),
        peer=peer,
        cover=COVER if output is None else None,
        assessment=assessment,
        both_sides=report_parts.picture([*figures.values()]),
        one_shot=one_shot,
        release=contract.get("release") if of_labels else None,
        of_columns=of_columns,
        epochs=summary.counts.epochs,
        one_sided=one_sided,
        exposure=exposure,
        columns=sorted(columns, key=lambda one: -one.gain),
        small_loss=SMALL_LOSS,
        most_bars=_MOST_BARS,
        aligned_rows=summary.counts.aligned_rows,
        cut_shape=contract.get("cut_shape"),
        unjudged=exposure.unjudged if exposure else (),
        sent=None if traffic is None else bytes_in_words(traffic.sent.size_bytes),
        also_left=sorted(one for one in left if not one.startswith(_NAMED)),
        agreed=list(_agreed(settings, contract)),
        circumstances=list(report_parts.circumstances(summary, read_metrics(folder), traffic)),
        traffic_rows=[
            one._replace(kind=f"{one.kind}: {content[one.kind]}") if one.kind in content else one
            for one in crossed
        ],
    )
    path = output or folder / "report.html"
    write_text_atomically(path, page)
    return path


def read_exposure(folder: Path) -> FeatureExposure | None:
    try:
        written = json.loads(text_of(folder / EXPOSURE) or "{}")
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{folder / EXPOSURE}: not valid JSON") from error
    return exposure_from_json(written)


def _assessment(
    exposure: FeatureExposure | None, is_or_was: str, max_exposure: object
) -> Assessment:
    if exposure is None or not exposure.columns:
        return Assessment(
            "unknown",
            "Not measured",
            f"What {is_or_was} sent may reveal our columns: how well they can be guessed was not "
            f"measured.",
            f"Let a run end with at least {LEAST_ROWS} common records and finite activations.",
            "some seconds at the end of a run. No label is needed.",
        )
    best = max(exposure.columns, key=lambda one: (one.is_above_chance, one.gain))
    price = "what they add to the model"
    if not exposure.losses:
        price += ": compare the label owner's cover pages"
    price += ". What was sent adds up."
    next_step = (
        "Next time, leave columns that the label owner must not know so well out of data.features "
        "in passive.yaml."
    )
    style, word = "unknown", "No gain measured, none excluded"
    if isinstance(max_exposure, int | float):
        is_above = exposure.disclosure > max_exposure
        style = "fail" if is_above else "within"
        word = f"Average {'above' if is_above else 'within'} the limit, {max_exposure:g}"
    if not best.is_above_chance:
        return Assessment(
            style,
            word,
            f"From what {is_or_was} sent, no column was guessed better than without it. "
            "No bound says that nobody guesses better.",
            next_step.replace("so well", "at all"),
            price,
        )
    is_mostly_known = any(one.is_mostly_known for one in exposure.columns)
    next_step = f"{next_step} {exposure.remedy}".strip()
    if style == "unknown":
        word = f"Columns can be guessed{'' if is_mostly_known else ' in part'}"
    if style == "within":
        next_step = f"None is needed for this limit. {next_step}"
    return Assessment(
        style,
        word,
        f"A label owner that knows “{best.name}” of {exposure.known_rows:,} records guesses "
        f"{_GUESSED[best.kind]} correctly for {best.of_100(best.right)} of 100 others with what "
        f"{is_or_was} sent, and for {best.of_100(best.without)} without.",
        next_step,
        price,
    )


def _within_limit(exposure: FeatureExposure | None, most: object, *, was_sent: bool) -> CheckAnswer:
    if not was_sent:
        return CheckAnswer("does not apply", "Nothing of the columns was sent.")
    if exposure is None or not exposure.columns:
        return CheckAnswer("no", "It was not measured.")
    if not isinstance(most, int | float):
        return CheckAnswer("no", "The feature owner has set no limit.")
    is_within, measured = exposure.disclosure <= most, f"measured: {exposure.disclosure:.2f}"
    return CheckAnswer("ticked" if is_within else "no", f"Limit: {most:g}; {measured}.")


def _agreed(settings: Mapping[str, Any], contract: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    alignment = as_mapping(contract.get("alignment"))
    for name, label in (
        ("min_aligned", "fewest common ids (min_aligned)"),
        ("max_set_size", "most ids per exchange (max_set_size)"),
    ):
        if isinstance(alignment.get(name), int):
            yield label, f"{alignment[name]:,}"
    if isinstance(settings.get("alignment_attempts"), int):
        yield "ids that the peer may try (alignment_attempts)", f"{settings['alignment_attempts']}"
    adversary = as_mapping(settings.get("adversary"))
    labels = "yes (figures of them are not on this page)" if adversary.get("labels") else "no"
    yield "this party has evaluation labels", labels
    yield "transcript", "yes" if settings.get("transcript", True) is True else "no"
    yield "saved weights the run began with", str(settings.get("initial_weights") or "none")
