"""Looks at a table and writes the settings that fit it."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from splitveil.common.data.ids import CONTRADICTING
from splitveil.common.data.kinds import with_advice
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sources import ColumnsInMemory
from splitveil.common.data.table import Table, table_of
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.arguments import print_json
from splitveil.common.party.party_settings import Address, load_party_settings
from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.run_folder import write_text_atomically
from splitveil.common.run.contract import ACTIVE, Name
from splitveil.common.settings import validate
from splitveil.common.text.values import as_mapping
from splitveil.common.text.visible_text import visible
from splitveil.common.text.yaml_text import read_yaml_file
from splitveil.deploy.init.choices import Wishes, judged
from splitveil.deploy.init.columns import Column, columns_of_sums
from splitveil.deploy.init.proposal import Proposal, Terms, propose, texts_of, write_files
from splitveil.deploy.init.tables import RawTable, read_raw
from splitveil.passive_party.settings import PassiveSettings


class Written(NamedTuple):
    proposal: Proposal
    columns: Sequence[Column]
    files: Sequence[Path]
    id_doubts: Sequence[str]  # forms of ids that the other party may not write
    codes: Sequence[str]  # read as "no value", as columns of numbers hold them repeatedly
    width: str  # says how many numbers the columns allow to be sent; empty without labels' contract
    lists: str = ""  # says that this table has more rows than the contract allowed for, if so

    def remarks(self) -> list[tuple[str, str]]:
        """Say which marks are none of the cells' own, and which texts mean "no value"."""
        marks = {"quote": "around cells", "escape": "before marks within cells"}
        source = self.proposal.source
        said = [
            ("text", f"{source[name]} stands {what}: see data.source.{name}")
            for name, what in marks.items()
            if name in source
        ]
        codes, used = ", ".join(map(repr, self.codes)), self.proposal.choices.used
        texts = [column for column in self.columns if column.kind == "text" and column.name in used]
        gaps = {column.name: ", ".join(map(repr, filter(None, column.gaps))) for column in texts}
        found = ", ".join(f"{name} ({shown})" for name, shown in gaps.items() if shown)
        what = "no value; with --no-gaps NAME, every text of a column is a value"
        of_numbers = f"{codes}: no value, as columns of numbers show; see missing_texts"
        said += [("lists", self.lists)] * bool(self.lists)
        said += [("gaps", of_numbers)] * bool(codes) + [("gaps", f"{found}: {what}")] * bool(found)
        return said

    def as_json(self) -> dict[str, Any]:
        p, label = self.proposal, self.proposal.choices.label
        within = None if label is None else label.within
        return {
            "files": [str(path) for path in self.files],
            "rows": p.num_rows,
            "id_column": p.choices.id_column,
            "rows_without_id": p.ids.without_id,
            "rows_with_earlier_id": p.ids.repeated,
            "id_doubts": self.id_doubts,
            "label_column": None if label is None else label.column,
            "label_column_is_guessed": label is not None and label.is_guessed,
            "positive_label": None if label is None else label.positive_setting,
            "positive_label_is_guessed": label is not None and label.positive_is_guessed,
            "num_classes": None if label is None or within else label.num_classes,
            "label_range": [within.low, within.high] if within else None,
            "rarest_share": None if label is None or within else round(label.rarest_share, 6),
            "numeric": [column.name for column in p.choices.numeric],
            "categorical": [column.name for column in p.choices.categorical],
            "timestamps": [column.name for column in p.choices.timestamps],
            "read_as_gaps": self.codes,
            "decided": p.choices.decided,
            "left_out": {**p.choices.left_out},
            "columns": {
                column.name: {
                    "kind": column.kind,
                    "distinct": column.distinct,
                    "missing": column.missing,
                }
                for column in self.columns
            },
            "contract": p.sizes._asdict(),
            "width": self.width,
        }


def initialise(
    path: Path,
    wishes: Wishes,
    terms: Terms,
    *,
    delimiter: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    force: bool = False,
) -> Written:
    """Look at a table and write the settings that fit it."""
    named = (wishes.id_column, wishes.label_column, *wishes.numeric, *wishes.categorical)
    as_written = {wishes.id_column or "", *wishes.categorical, *wishes.exclude}
    table = read_raw(
        path,
        delimiter,
        encoding,
        decimal,
        has_header=any(named),
        numeric=wishes.numeric,
        as_written=as_written,
    )
    beside = terms.folder / "active.yaml"
    if terms.role != ACTIVE and beside.is_file():
        data = as_mapping(as_mapping(read_yaml_file(beside)).get("data"))
        if isinstance(name := data.get("label_column"), str):
            wishes = wishes._replace(label_column=name)
    columns, codes, wishes = judged(table.columns, wishes)
    for name, row in {"first": 0, "last": -1}.items() if not wishes.as_written else ():
        found = columns_of_sums(columns, table.columns, row)
        if found and table.is_whole:
            raise SettingsError(
                f"{path}: the {name} row seems to be a total: in {', '.join(found[:5])}, it is the "
                f"sum of all others: delete it, or --as-written"
            )
    with with_advice(table.settings, Path()):
        proposal = propose(table, columns, wishes, terms)
    texts = texts_of(proposal, terms.role)
    read = _read_as_a_run_does(table, proposal, texts[f"{terms.role}.yaml"])
    files = write_files(terms.folder, texts, force=force)
    # Read back as a run does; a passive party may not have the contract yet.
    if terms.role == ACTIVE:
        # Here, because they import torch.
        from splitveil.active_party.settings import ActiveSettings  # noqa: PLC0415

        load_party_settings(ActiveSettings, terms.folder / "active.yaml")
    elif (terms.folder / "contract.yaml").exists():
        load_party_settings(PassiveSettings, terms.folder / "passive.yaml")
    width, lists = "", ""
    if terms.role != ACTIVE:
        lists = _make_room(terms.folder, proposal.sizes.max_set_size)
        width = _narrow(terms.folder)
    doubts = [*read.id_doubts]
    if rows := read.id_report.contradicting:
        doubts.append(f"{rows:,} of the rows with the id of an earlier row {CONTRADICTING}")
    return Written(proposal, columns, files, doubts, codes, width, lists)


def _read_as_a_run_does(table: RawTable, proposal: Proposal, text: str) -> Table:
    """Refuse whatever a run would refuse, before anything is written."""
    in_memory = {"source": {"kind": "csv", "path": "as read by init"}}
    settings = validate(DataSettings, yaml.safe_load(text)["data"] | in_memory, "data")
    choices = proposal.choices
    texts = {choices.id_column, *(column.name for column in choices.categorical)}
    if choices.label is not None and choices.label.within is None:
        texts.add(choices.label.column)
    written = {name: cells for name, cells in table.written.items() if name in texts}
    source = ColumnsInMemory(str(table.path), {**table.columns, **written})
    rule = proposal.ids.rule
    if choices.label is None:  # the contract, which this party does not write, may not fold case
        rule = rule.model_copy(update={"fold_case": False})
    return table_of(source, settings, None, [rule])


def _make_room(folder: Path, rows: int) -> str:
    """Raise the contract's limit on ids to the rows of a larger table; return a line about it."""
    path = folder / "contract.yaml"
    if not path.exists():
        return ""
    alignment = load_party_settings(PassiveSettings, folder / "passive.yaml").contract.alignment
    if rows <= alignment.max_set_size:
        return ""
    limit = f"max_set_size: {rows}"
    if not _write_line(path, f"{limit}  # most ids that a party may bring: this table's", 0o644):
        return f"expected in contract.yaml: {limit}, for the rows of this table"
    return f"contract.yaml: {limit}, for the rows of this table"


def _narrow(folder: Path) -> str:
    """Write the width that the columns allow into the contract beside them, if it is narrower.

    Returns a line for the user about it, if any.
    """
    path, own = folder / "contract.yaml", folder / "passive.yaml"
    if not path.exists():
        return "contract.yaml is not here yet; then: splitveil plan passive.yaml"
    agreed = load_party_settings(PassiveSettings, own).contract
    settings = load_party_settings(PassiveSettings, own, ["contract.cut_shape=[1]"])
    if not agreed.is_one_shot:
        return ""
    from splitveil.common.party.party_data import PartyData  # noqa: PLC0415
    from splitveil.passive_party.exposure_plan import exposure_plan_of  # noqa: PLC0415

    try:
        plan = exposure_plan_of(settings, PartyData.of(settings))
    except SplitveilError as error:
        return f"{error}"
    most = settings.max_exposure or 1.0
    width = min(plan.widest(most) or min(plan.exposures), agreed.cut_dim)
    shown = next(one for at, one in plan.exposures.items() if at >= width)
    disclosed = math.ceil(100 * shown.disclosure) / 100
    said = f"which gives away {disclosed:.2f} of what the feature owner's columns hide"
    if disclosed > most:
        _write_line(own, f"max_exposure: {disclosed}  # of one number", 0o600)
    line = f"cut_shape: [{width}]  # numbers that are sent per row, {said}: splitveil plan"
    if width < agreed.cut_dim and not _write_line(path, line, 0o644):
        return f"expected in contract.yaml: cut_shape: [{width}], {said}"
    instead = f", in the place of {[*agreed.cut_shape]}" * (width < agreed.cut_dim)
    return f"contract.yaml: cut_shape: [{width}], {said}{instead}"


def _write_line(path: Path, line: str, mode: int) -> bool:
    """Write a setting in the place of its line; False if its value is not all in one line."""
    name, text = line.partition(":")[0], path.read_text(encoding="utf-8")
    value = r"(\[[^\]\n]*\]|[\d.]+)"
    of_name = rf"^( *){name}: *{value} *(#.*)?$"
    text, count = re.subn(of_name, lambda at: at[1] + line, text, flags=re.MULTILINE)
    if count:
        write_text_atomically(path, text, mode)
    return bool(count)


def perform(options: argparse.Namespace) -> int:
    of_labels = ("label_column", "positive_label", "label_range", "unlabelled_rows")
    if options.role != ACTIVE and any(getattr(options, name) for name in of_labels):
        raise SettingsError(
            "--label-column, --positive-label, --label-range, --unlabelled-rows: only the active "
            "party has labels"
        )
    if options.positive_label and options.label_range:
        raise SettingsError("--label-range: labels that are numbers have no --positive-label")
    low, high = options.label_range or (0.0, 1.0)
    if not low < high or not math.isfinite(high - low):
        raise SettingsError("--label-range: expected two finite numbers, the lower one first")
    for option, kind, value in (
        ("--party", Name, options.party),
        ("--run-name", Name, options.run_name or "run"),
        ("--address", Address, options.address),
    ):
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            what = "HOST:PORT" if option == "--address" else "letters, digits, dots and hyphens"
            raise SettingsError(f"{option} {value}: expected {what}") from error
    with ProgressBar(f"reading {options.file.name}"):
        written = initialise(
            options.file,
            Wishes(
                id_column=options.id_column,
                has_id=not options.no_id_column,
                label_column=options.label_column,
                positive_label=tuple(options.positive_label),
                leave_out_unlabelled=options.unlabelled_rows is not None,
                as_written=options.as_written,
                label_range=None if options.label_range is None else (low, high),
                numeric=tuple(options.numeric),
                categorical=tuple(options.categorical),
                exclude=tuple(options.exclude),
                first_year=options.first_year,
                missing_texts=tuple(options.missing_text),
                no_gaps=tuple(options.no_gaps),
            ),
            Terms(options.role, options.folder, options.party, options.run_name, options.address),
            delimiter=options.delimiter,
            encoding=options.encoding,
            decimal=options.decimal,
            force=options.force,
        )
    if options.json:
        print_json(written.as_json())
    else:
        _print(written)
    return 0


def _print(written: Written) -> None:
    console = Console(highlight=False, soft_wrap=True)
    p, label = written.proposal, written.proposal.choices.label

    def say(name: str, what: str) -> None:
        console.print(visible(f"{name:<12} {what}"), markup=False)

    say("rows", p.rows_in_words)
    say("ids", p.choices.id_column or "the rows' numbers")
    for doubt in filter(None, [p.ids.losses, *written.id_doubts]):
        say("warning", doubt)
    if label is not None:
        say("labels", f"{label.column}: {p.balance}")
        if label.is_guessed:
            say("", f"({label.doubt}; --label-column names another)")
    say("numbers", ", ".join(column.name for column in p.choices.numeric) or "none")
    say("categories", ", ".join(column.name for column in p.choices.categorical) or "none")
    if p.choices.timestamps:
        say("times", ", ".join(column.name for column in p.choices.timestamps))
    for what in (*written.remarks(), *p.choices.said):
        say(*what)
    if label is not None:
        say("exchange", "one_shot: nothing that depends on a label is sent")
    if written.width:
        say("columns", written.width)
    for path in written.files:
        say("written", str(path))
    own = next(path for path in written.files if path.name != "contract.yaml")
    say("next", f"splitveil check {own}")
