"""The cover page of a run, which both sides sign: ``cover.json``, and ``cover.html`` made of it.

Each party writes its own page, of what it knows by its settings, by the contract and by what was
sent; for all else it names the other's page. Run id and fingerprint of the contract are on both.
Either may see the other's: a page names no column, no attack and no strength of a defense.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from splitveil.common.party.report_parts import ScaleRow, Traffic, picture, read_traffic, render
from splitveil.common.record.model_files import identity_of
from splitveil.common.record.run_folder import end_of, write_json_atomically, write_text_atomically
from splitveil.common.record.run_record import AlignmentLine, Summary, read_metrics
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.values import as_mapping
from splitveil.common.text.wording import bytes_in_words

COVER = "cover.html"

CHECKS: Mapping[str, str] = {
    "bound": "A bound on how well outcomes are revealed holds for anybody.",
    "sums": "A bound that rests on cryptography is enough.",
    "target": "The bound is within the limit that was agreed, and a budget limits all runs "
    "together.",
    "figure": "The figure is acceptable for these outcomes.",
    "rows": "No person has several rows, the bound is for each person, or that of each row is "
    "enough.",
    "lists": "The largest size of a list that the settings allow is not far above the longest one.",
    "limit": "The measured average over the columns is within the limit of each feature owner.",
    "columns": "Each feature owner has read its plan and its report, and accepts what can be "
    "guessed of its columns.",
    "membership": "The feature owner may know which people are on both lists, or does not learn "
    "it.",
    "predictions": "Predictions may name ids, or the whole table is sent sealed.",
    "keys": "Each side made its own key, and all compared the keys' fingerprints by telephone.",
    "contract": "A written agreement settles purpose, lists, figure and runs, predictions, "
    "deletion and objections, with dates.",
}
"""The list of ``docs/guide/data-protection.md``, which is signed off."""

_ROUNDED_UP = 1.25  # of a list's size: by `init`, or by the padding of buckets

_LABELS, _COLUMNS = "label owner", "feature owner"


class CheckAnswer(NamedTuple):
    """What the program finds of a check: a tick, ``no``, or that people have to tick it.

    It ticks nothing that only people know, such as that somebody has read a report.
    """

    answer: Literal["ticked", "no", "by hand", "other page", "does not apply"]
    found: str


def write_cover(
    folder: Path,
    party: str,
    settings: Mapping[str, Any],
    summary: Summary,
    verdict: tuple[str, str, str],
    figures: Mapping[str, ScaleRow],
    answers: Mapping[str, CheckAnswer],
    outcome: str = "See the label owner's cover page.",
) -> None:
    """Write a party's page and its facts into its folder of a run.

    Args:
        verdict: outcome, which is the class of the colour, words and sentence.
        figures: of labels, columns and model, by what the page calls them.
        outcome: the label and its classes or range, which only the label owner's page names.
        answers: to the checks that only this party can answer.
    """
    contract = as_mapping(settings.get("contract"))
    traffic, identities = read_traffic(folder), as_mapping(contract.get("identities"))
    provenance = summary.provenance
    whose = _COLUMNS if party == ACTIVE else _LABELS
    other = CheckAnswer("other page", f"See the cover page of the {whose}.")
    run_id, fingerprint = identity_of(folder)
    # Only of a run that was ended is the transcript known to be whole: a kill may lose lines.
    examined = None if ended_early_by(folder) is None else traffic
    rows = [*_exchanged(contract, summary, examined)]
    sent_of_labels = was_sent(contract, examined)[1]
    checks = {
        "lists": _lists(folder, contract),
        **_answers(settings, contract, sent_of_labels=sent_of_labels),
        **answers,
    }
    facts: dict[str, Any] = {
        "run": contract.get("run_name"),
        "run_id": run_id,
        "contract_sha256": fingerprint,
        "written_by": party,
        "version": summary.version,
        "ended_early_by": ended_early_by(folder),
        "started": None if traffic is None else traffic.first,
        "ended": None if provenance is None else provenance.ended,
        "parties": [
            {
                "party": str(name),
                "role": _LABELS if name == ACTIVE else _COLUMNS,
                "identity": str(identities.get(name, f"{name}.splitveil")),
            }
            for name in (ACTIVE, *(contract.get("passive_parties") or ("passive",)))
        ],
        "authenticated": as_mapping(settings.get("security")).get("mode") == "mtls",
        "common_rows": summary.counts.aligned_rows,
        "exchanged": [row for row, was_sent in rows if was_sent],
        "not_sent": [row["what"] for row, was_sent in rows if not was_sent],
        "messages": None
        if traffic is None
        else {"sent": traffic.sent._asdict(), "received": traffic.received._asdict()},
        "label": outcome,
        "outcome": verdict[0],
        "verdict": verdict[1],
        "sentence": verdict[2],
        "figures": {name: one._asdict() for name, one in figures.items()},
        "checks": [
            {"name": name, "check": check, **checks.get(name, other)._asdict()}
            for name, check in CHECKS.items()
        ],
    }
    write_json_atomically((folder / COVER).with_suffix(".json"), facts)
    page = render(
        str(__package__),
        "cover.html.jinja",
        title=f"{facts['run'] or folder.name}",
        facts=facts,
        picture=picture([*figures.values()]),
        bytes_in_words=bytes_in_words,
    )
    write_text_atomically(folder / COVER, page)


def nothing_of_labels(contract: Mapping[str, Any]) -> bool:
    """Return whether the contract lets nothing be sent that depends on a label."""
    return contract.get("exchange") == "one_shot" and not contract.get("release")


def ended_early_by(folder: Path) -> str | None:
    """Return the setting or party that ended a run before its time; None if none did."""
    found = (end_of(folder) or {}).get("ended_by")
    return None if found is None else str(found)


def was_sent(contract: Mapping[str, Any], traffic: Traffic | None) -> tuple[bool, bool]:
    """Return whether activations were sent, and whether anything that depends on a label was.

    Without a transcript both are taken to be. The sums are in the last reply of a transfer, which
    is missing where the run ended before it; of a transfer that was begun again, they are taken to
    be sent.
    """
    if traffic is None:
        return True, not nothing_of_labels(contract)
    requests, replies = (traffic.count(f"Train {one}") for one in ("request", "reply"))
    if contract.get("exchange") != "one_shot":
        return requests > 0, replies > 0
    was_begun_again = traffic.count("Handshake request") > 1
    if contract.get("release") == "noisy_sums" and not was_begun_again and replies < requests:
        replies = 0
    return traffic.count("Evaluate request") > 0, replies > 0


_Row = tuple[Mapping[str, str], bool]  # and whether it was sent


def _exchanged(
    contract: Mapping[str, Any], summary: Summary, traffic: Traffic | None
) -> Iterator[_Row]:
    def row(what: str, way: str, how_often: str, *, is_sent: bool = True) -> _Row:
        return {"what": what, "way": way, "how_often": how_often}, is_sent

    of_columns, of_labels = was_sent(contract, traffic)
    are_several = len(contract.get("passive_parties") or ()) > 1
    owners = _COLUMNS + "s" * are_several
    up, down = f"{owners} to {_LABELS}", f"{_LABELS} to {owners}"
    epochs = summary.counts.epochs
    often = "once"
    if contract.get("exchange") != "one_shot":
        often = "in each epoch" if epochs is None else f"in each of {epochs:,} epochs"
    shape = contract.get("cut_shape") or ()
    numbers = "one number" if [*shape] == [1] else f"{' × '.join(map(str, shape))} numbers"
    activations = f"{numbers}, computed from its columns without noise"
    if _is_one_sided(contract):
        yield row("for each record of the table, sealed: " + activations, up, "once")
        yield row("how many ids it asks for, none in clear", down, "once")
    else:
        were_aligned = traffic is None or traffic.count("Align reply") > 0
        common = summary.counts.aligned_rows
        which = "which ids are on both" if common is None else f"which {common:,} ids are on both"
        known = f"Both sides now know {which} lists, and the size of the other's."
        if are_several:
            which = "of them all have" if common is None else f"{common:,} of them all have"
            known = (
                "The label owner and each feature owner now know which ids both have, which "
                f"{which}, and the size of the other's list."
            )
        blinded = f"every id, blinded by secrets of both sides. {known}"
        yield row(blinded, "both ways", "once", is_sent=were_aligned)
        yield row("for each common record: " + activations, up, often, is_sent=of_columns)
    taught = (
        f"It taught the {owners} how columns relate to the outcome, which the bound on labels does "
        "not limit. False outcomes can aim what is sent at a column."
    )
    last = "tables, outcomes as they are, models, predictions"
    match contract.get("release"):
        case "noisy_labels":
            noisy = f"for each record in training: its outcome, with noise. {taught}"
            yield row(noisy, down, "once", is_sent=of_labels)
        case "noisy_sums":
            sums = f"sums of the outcomes of records in training, with noise. {taught}"
            yield row(sums, down, "once", is_sent=of_labels)
        case _ if nothing_of_labels(contract):
            yield row("of outcomes: nothing", down, "never")
        case _:
            gradients = (
                "for each record in training: numbers that correct the model (gradients). Outcomes "
                "can be read from them as far as no bound on labels limits it."
            )
            last = "tables, models, predictions"
            yield row(gradients, down, often, is_sent=of_labels)
    yield row(last, "neither way", "never")


def _answers(
    settings: Mapping[str, Any], contract: Mapping[str, Any], *, sent_of_labels: bool
) -> dict[str, CheckAnswer]:
    """Answer what both sides can by the contract and their own settings."""
    found = {
        "sums": CheckAnswer("does not apply", "No noisy sums were sent."),
        "figure": CheckAnswer("by hand", "No program can tell what harm an outcome can do."),
        "rows": CheckAnswer("by hand", "No program can tell which ids are one person's."),
        "columns": CheckAnswer("by hand", "No program can tell what was read and accepted."),
        "membership": CheckAnswer("by hand", "Where ids were compared, the common ones are known."),
        "predictions": CheckAnswer(
            "by hand", "Ids travel in clear unless the table is sent whole."
        ),
        "keys": CheckAnswer("by hand", "Certificates were checked; no program hears a telephone."),
        "contract": CheckAnswer(
            "by hand", "The program knows the settings, not what else was signed."
        ),
    }
    if contract.get("release") == "noisy_sums" and sent_of_labels:
        found["sums"] = CheckAnswer("by hand", "Noisy sums were sent.")
    if as_mapping(settings.get("defense")).get("subject_column"):
        found["rows"] = CheckAnswer("ticked", "The bound is for each person.")
    if not sent_of_labels:
        nothing = CheckAnswer("does not apply", "Nothing that depends on an outcome was sent.")
        found |= {"rows": nothing, "figure": nothing}
        found["bound"] = CheckAnswer("ticked", "Nothing that depends on an outcome was sent.")
    if _is_one_sided(contract):
        found["membership"] = CheckAnswer("ticked", "It does not learn it.")
        found["predictions"] = CheckAnswer("ticked", "The whole table is sent, sealed.")
    if as_mapping(settings.get("security")).get("mode") != "mtls":
        found["keys"] = CheckAnswer("no", "Nobody was authenticated: the run had no certificates.")
    return found


def _lists(folder: Path, contract: Mapping[str, Any]) -> CheckAnswer:
    alignment = as_mapping(contract.get("alignment"))
    most, lines = alignment.get("max_set_size"), read_metrics(folder).of(AlignmentLine)
    own = lines[-1].own_rows if lines else None
    if own is None or not isinstance(most, int):
        return CheckAnswer("by hand", "The size of this side's list was not recorded.")
    said = f"At most {most:,} ids; this side's list has {own:,}"
    if most <= _ROUNDED_UP * own:
        return CheckAnswer("ticked", f"{said}.")
    return CheckAnswer("other page", f"{said}: another page has to tick it.")


def _is_one_sided(contract: Mapping[str, Any]) -> bool:
    return as_mapping(contract.get("alignment")).get("kind") == "one_sided"
