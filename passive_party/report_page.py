"""Renders the passive party's report from the files in its folder of a run."""

import argparse
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from splitveil.common.errors import SettingsError
from splitveil.common.party.json_output import print_json
from splitveil.common.party.report_parts import (
    Traffic,
    Volume,
    circumstances,
    read_traffic,
    render,
    traffic_rows,
)
from splitveil.common.record.run_folder import write_json_atomically, write_text_atomically
from splitveil.common.record.run_record import METRICS, find_summary, read_metrics, text_of
from splitveil.common.record.summary import Summary
from splitveil.common.record.values import as_mapping
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.wording import bytes_in_words
from splitveil.common.text.yaml_text import RESOLVED, load_yaml
from splitveil.passive_party.feature_exposure import (
    ColumnExposure,
    FeatureExposure,
    exposure_from_json,
    exposure_to_json,
)

logger = logging.getLogger("splitveil.passive_party")

EXPOSURE = "exposure.json"

_PACKAGE = "splitveil.passive_party"

# What each kind of message that this party sends contains.
_CONTENT: Mapping[str, str] = {
    "Handshake request": "the contract, field by field",
    "Align request": "ids, blinded by a secret of this party",
    "Train request": "activations of training rows",
    "Evaluate request": "activations of held-out and surveyed rows",
    "Audit request": "scores of training rows, for audits",
    "Leave request": "how this party's part ended",
    "Describe request": "questions about the model that is served",
    "Embed reply": "activations of rows asked for by id",
    "EmbedTable reply": "encrypted activations of the whole table",
}


class Left(NamedTuple):
    content: str
    messages: str
    size: str


class ColumnRow(NamedTuple):
    name: str
    measure: str
    figure: str
    without: str
    width: str  # of a bar, as a CSS percentage


class PassiveFiles(NamedTuple):
    folder: Path
    settings: Mapping[str, Any]
    summary: Summary
    traffic: Traffic | None
    exposure: FeatureExposure | None


def report(parsed: argparse.Namespace) -> None:
    written = write_passive_report(parsed.run_dir, parsed.output)
    if parsed.json:
        print_json({"report": str(written)})
    logger.info("report written to %s", written)


def write_exposure(folder: Path, exposure: FeatureExposure) -> None:
    write_json_atomically(folder / EXPOSURE, exposure_to_json(exposure))


def write_passive_report(folder: Path, output: Path | None = None) -> Path:
    own = folder / "passive" if (folder / "passive" / METRICS).is_file() else folder
    files = read_files(own)
    path = output or own / "report.html"
    write_text_atomically(path, passive_page(files))
    return path


def read_files(folder: Path) -> PassiveFiles:
    settings = as_mapping(
        load_yaml(text_of(folder / "settings.yaml") or "{}", str(folder), RESOLVED)
    )
    if not (folder / METRICS).is_file() or "bottom_model" not in settings:
        raise SettingsError(f"{folder}: expected a passive party's folder of a run")
    try:
        written = json.loads(text_of(folder / EXPOSURE) or "{}")
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{folder / EXPOSURE}: not valid JSON") from error
    summary = find_summary(folder) or Summary()
    return PassiveFiles(
        folder, settings, summary, read_traffic(folder), exposure_from_json(written)
    )


def passive_page(files: PassiveFiles) -> str:
    contract = as_mapping(files.settings.get("contract"))
    peer = _peer(files.settings, contract)
    exposure = files.exposure
    columns = () if exposure is None else exposure.columns
    return render(
        _PACKAGE,
        "passive.html.jinja",
        title=f"{contract.get('run_name', files.folder.name)}",
        party=str(files.settings.get("party", "passive")),
        peer=peer,
        headline=_headline(files, peer),
        revealed=list(_revealed(files, contract)),
        left=list(_left(files.traffic)),
        exposure=exposure,
        columns=[_row(one) for one in sorted(columns, key=lambda one: -one.gain_fraction)],
        agreed=list(_agreed(files.settings, contract)),
        circumstances=list(circumstances(files.summary, read_metrics(files.folder), files.traffic)),
        traffic_rows=traffic_rows(files.traffic, ACTIVE),
    )


def _peer(settings: Mapping[str, Any], contract: Mapping[str, Any]) -> str:
    if as_mapping(settings.get("security")).get("mode") != "mtls":
        return "a process on this machine, in plain text (nobody was authenticated)"
    identity = as_mapping(contract.get("identities")).get(ACTIVE, f"{ACTIVE}.splitveil")
    return f"{identity} (the name in the certificate that the peer showed, TLS 1.3)"


def _headline(files: PassiveFiles, peer: str) -> str:
    rows = files.summary.counts.aligned_rows
    about = "aligned rows" if rows is None else f"{rows:,} aligned rows"
    if files.traffic is None:
        return f"Activations of {about} left to {peer}; their size is not recorded."
    size = bytes_in_words(files.traffic.sent.size_bytes)
    return f"{size} left, about {about}, to {peer}."


def _revealed(files: PassiveFiles, contract: Mapping[str, Any]) -> Iterator[str]:
    rows, exposure = files.summary.counts.aligned_rows, files.exposure
    if rows is not None and exposure is not None:
        yield (
            f"The peer has learned which {rows:,} of its ids this party has too, and that this "
            f"party offered {exposure.own_rows:,} ids; of the others it received blinded ids only."
        )
    shape = contract.get("cut_shape")
    if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
        yield (
            f"Each activation has the shape {' x '.join(map(str, shape))} "
            f"({contract.get('cut_dtype', 'float32')}). Nothing is added to it: no noise protects "
            "the features behind it."
        )
    if exposure is None:
        yield "What activations reveal of features was not measured."
        return
    best = max(exposure.columns, key=lambda one: one.gain_fraction, default=None)
    if best is not None:
        found = _row(best)
        yield (
            f"Reconstructed best: {best.name}. Whoever knows it for some rows reconstructs it for "
            f"others with {found.measure} {found.figure}, where no activation gives "
            f"{found.without}."
        )


def _left(traffic: Traffic | None) -> Iterator[Left]:
    if traffic is None:
        return
    totals: dict[str, Volume] = {}
    for (_, direction, kind), volume in traffic.volumes.items():
        if direction == "sent":
            content = _CONTENT.get(kind, kind)
            totals[content] = totals.get(content, Volume()) + volume
    for content, volume in sorted(totals.items(), key=lambda item: -item[1].size_bytes):
        yield Left(content, f"{volume.messages:,}", bytes_in_words(volume.size_bytes))


def _row(one: ColumnExposure) -> ColumnRow:
    measure = "R²" if one.kind == "numeric" else "accuracy"
    figure, without = f"{max(one.figure, 0.0):.2f}", f"{one.without:.2f}"
    return ColumnRow(one.name, measure, figure, without, f"{100 * one.gain_fraction:.0f}%")


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
    yield "audits allowed by the contract", _yes_no(value=contract.get("audits_allowed"))
    yield "this party asks for audits", _yes_no(value=adversary.get("audit"))
    labels = "yes (figures of them are not on this page)" if adversary.get("labels") else "no"
    yield "this party has evaluation labels", labels
    yield "transcript", _yes_no(value=settings.get("transcript", True))
    yield "saved weights the run began with", str(settings.get("initial_weights") or "none")


def _yes_no(*, value: object) -> str:
    return "yes" if value is True else "no"
