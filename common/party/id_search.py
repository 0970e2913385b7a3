"""Says which of a party's files hold some ids, for requests of access and of erasure.

It only reads, and prints numbers instead of ids, so that what it prints can be filed. A run's ids
are compared in the canonical form of that run's contract. Files that name rows by position or by
secret digests may depend on an id if the run's table has it, or may have had it.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter
from rich.console import Console

from splitveil.common.data import converted
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.columns import check_columns_exist
from splitveil.common.data.ids import check_rules, part_ids
from splitveil.common.data.kinds import columns_in_parts, open_source
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.source_settings import SqlSource, expand_path
from splitveil.common.data.table_files import read_id_list, source_of
from splitveil.common.errors import DataError, SettingsError, SplitveilError
from splitveil.common.party.arguments import print_json
from splitveil.common.party.command_line import stored_settings
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.record.table_output import FORMATS
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.id_rules import IdRule, IdRules
from splitveil.common.settings import validate
from splitveil.common.text.visible_text import visible

Rules: TypeAlias = tuple[IdRule, ...]
Which: TypeAlias = NDArray[np.bool_]  # of the ids in question, (ids,)
Reader: TypeAlias = Callable[[Path, Sequence[str]], Which]  # of a folder, for canonical ids
Digests: TypeAlias = Mapping[str, tuple[str, str, Reader]]
"""Files in ``checkpoint`` that name rows by digests: what each is, and what can be done about it.
"""

_UNREADABLE = (SplitveilError, OSError, ValueError, LookupError, TypeError)
AGAIN = "train again without the row, then delete the run's folder at both parties"
_UNSEARCHED = {
    "*.safetensors": "weights of a model",
    "encoder.json": "categories and scales of all training rows",
    "*.state": "the state of an unfinished run",
    "answered.log": "charges, and digests of whole batches",
    "*.key.labels": "labels that noise was drawn for, by secret digests",
    "received-*.npz": "received gradients and activations, by position",
    "transcript.jsonl": "size and digest of each message",
    "*.html": "figures about all rows together",
    "*.json*": "figures about all rows together",
}


class _Held(NamedTuple):
    path: object
    what: str
    then: str
    ids: Which
    is_certain: bool


def find(
    parsed: argparse.Namespace, digests: Digests | None = None, books: Iterable[Path] = ()
) -> None:
    """Print which files hold which ids; in the end, DataError if some could not be searched.

    Args:
        books: further ``checkpoint`` folders.
    """
    search = _Search(parsed.loaded, _asked(parsed, parsed.loaded), digests or {})
    search.tables(parsed.also)
    for folder in search.runs:
        search.run(folder)
    for checkpoint in books:
        search.named(checkpoint, search.rules)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=parsed.json)
    document: list[dict[str, object]] = []
    for number in range(search.count):
        held = [one for one in search.held if one.ids[number]]
        certain = sum(one.is_certain for one in held)
        console.print(
            f"id {number + 1} of {search.count}: held in {certain} places; {len(held) - certain} "
            f"more may depend on it"
        )
        for then in dict.fromkeys(one.then for one in held):
            console.print(f"  {then}:", markup=False)
            for one in held:
                if one.then == then:
                    kind = "holds it" if one.is_certain else "may depend on it"
                    line = visible(f"    {kind}: {one.path}: {one.what}")
                    console.print(line, markup=False)
        document += [
            {"id": number + 1, "path": str(one.path), "certain": one.is_certain}
            | {"what": one.what, "then": one.then}
            for one in held
        ]
    if parsed.json:
        print_json({"ids": search.count, "found": document, "unreadable": search.unreadable})
    if search.unreadable:
        problems = "\n".join(dict.fromkeys(search.unreadable))
        raise DataError(f"{problems}\nthe answer lacks what these hold")


def _asked(parsed: argparse.Namespace, settings: PartySettings) -> Sequence[Any]:
    """Return the ids in question as written, by column of ids."""
    columns = settings.data.id_columns
    if not columns:
        raise SettingsError("data.id_column: rows are known by their numbers, which name nobody")
    if parsed.ids is not None:
        return [*read_id_list(parsed.ids, settings.data, settings.contract.ids).written.columns]
    if len(columns) > 1:
        raise SettingsError(f"{settings.data.place_of_ids} make up an id: expected --ids TABLE")
    if not parsed.id and sys.stdin.isatty():
        sys.stderr.write("ids, one per line, then Ctrl-D:\n")
    try:
        lines = [line for line in parsed.id or sys.stdin.read().split("\n") if line.strip()]
        cells = pa.chunked_array([lines], pa.string())
    except UnicodeError:  # which quotes the ids
        raise DataError("the ids are not UTF-8") from None
    if not lines:
        raise DataError("there are no ids: expected --id, --ids, or one per line as input")
    return [cells]


class _Search:
    def __init__(self, settings: PartySettings, asked: Sequence[Any], digests: Digests) -> None:
        self._settings, self._asked, self._digests = settings, asked, digests
        self.count = len(asked[0])
        self._all = np.ones(self.count, np.bool_)
        self.held: list[_Held] = []
        self.unreadable: list[str] = []
        self._in_table: dict[str, Which] = {}
        name = re.compile(rf"{re.escape(getattr(settings, 'party', ACTIVE))}(\.previous-[0-9]+)?")
        places = chain(*(settings.runs_dir.glob(one) for one in ("*/*", "*/alignment/*")))
        own = sorted(one for one in places if name.fullmatch(one.name) and one.is_dir())
        self.runs = {folder: self._read_as(folder) for folder in own}
        ways = ((settings.data, settings.contract.ids), *self.runs.values())
        self._ways = [*{_key(*way): way for way in ways}.values()]
        self.rules = [rules for _, rules in self._ways]
        forms = zip(*map(self._forms, self.rules), strict=True)
        if none := [str(at) for at, own in enumerate(forms, start=1) if not any(own)]:
            raise DataError(f"id {', '.join(none)} of {self.count}: no id by the rules of any run")

    def _read_as(self, folder: Path) -> tuple[DataSettings, Rules]:
        """Return how a run read its table; as these settings do if that cannot be known."""
        try:
            values = stored_settings(folder)
            data = validate(DataSettings, values["data"], f"{folder}/settings.yaml")
            rules: Rules = TypeAdapter(IdRules).validate_python(values["contract"]["ids"])
        except _UNREADABLE as error:
            self.unreadable.append(f"{folder}: its settings cannot be read: {_in_words(error)}")
            return self._settings.data, self._settings.contract.ids
        return data, rules

    def _forms(self, rules: Rules) -> list[str]:
        """Return the ids in canonical form; "" for what is no id by these rules."""
        if len(rules) != len(self._asked):
            return [""] * self.count
        names = tuple(map(str, range(len(rules))))
        data = self._settings.data.model_copy(update={"id_column": names})
        cells = dict(zip(names, self._asked, strict=True))
        return CanonicalForm(rules).of(part_ids(data, rules, cells, "the ids"))

    def _among(self, texts: Iterable[str], *rules: Rules) -> Which:
        """Return which ids are among canonical texts, by given rules or else by all runs'."""
        forms = [*map(self._forms, rules or self.rules)]
        present = {*chain(*forms)}.difference([""]).intersection(texts)
        return np.array([any(form[i] in present for form in forms) for i in range(self.count)])

    def _note(self, path: object, what: str, then: str, search: Callable[[], Which]) -> Which:
        try:
            ids = search()
        except _UNREADABLE as error:
            self.unreadable.append(f"{path}: cannot be searched: {_in_words(error)}")
            return self._all
        self.held.append(_Held(path, what, then, ids, is_certain=True))
        return ids

    def _may(self, path: object, what: str, then: str, ids: Which) -> None:
        self.held.append(_Held(path, what, then, ids, is_certain=False))

    def _has(self, data: DataSettings, rules: Rules) -> Which:
        source, form = open_source(data.source, self._settings.base_dir), CanonicalForm(rules)
        check_rules(data, rules)
        check_columns_exist(data.id_columns, source.column_names(), source.name)
        parts = columns_in_parts(source, data.id_columns)
        texts = (form.of(part_ids(data, rules, part, source.name)) for part in parts)
        return self._among(chain.from_iterable(texts), rules)

    def _table(self, data: DataSettings, rules: Rules) -> Which:
        """Search the table of some settings, once."""
        source, key = data.source, _key(data, rules)
        if key not in self._in_table:
            path, then = (
                getattr(source, "path", source.kind),
                "leave the row out; later runs lack it",
            )
            if isinstance(source, SqlSource):  # to ask would leave a snapshot
                self._may(path, "a database, which is not asked", then, self._all)
                self._in_table[key] = self._all
            else:
                has = partial(self._has, data, rules)
                self._in_table[key] = self._note(path, "the table of a run", then, has)
        return self._in_table[key]

    def tables(self, also: Sequence[Path]) -> None:
        """Search tables, their copies, and tables of ids beside the settings or named."""
        base, copies = self._settings.base_dir, set[Path]()
        for data, rules in self._ways:
            self._table(data, rules)
            default = "snapshots" if isinstance(data.source, SqlSource) else None
            if (folder := getattr(data.source, "cache_dir", None) or default) is not None:
                copies.add(expand_path("cache_dir", folder, base))
        again = "delete it; a run makes it again from its table"
        for copy in sorted(copies):
            for path in sorted(copy.glob(f"*/{converted.MANIFEST}")):
                self._note(
                    path.parent, "a copy of a table", again, partial(self._in_copy, path.parent)
                )
            for path in sorted(copy.glob("query-*.parquet")):
                self._note(path, "a query's result", again, partial(self._in_file, path))
        read = {(base / getattr(data.source, "path", "")).resolve() for data, _ in self._ways}
        beside = [one for one in sorted(base.iterdir()) if one.suffix.lower() in FORMATS]
        beside = [one for one in beside if one.resolve() not in read]
        for path, skips in {**dict.fromkeys(beside, True), **dict.fromkeys(also, False)}.items():
            about = "rows, predictions or aligned ids", "delete the file, or the row in it"
            self._note(path, *about, partial(self._in_file, path, skips=skips))
        for path in base.glob("*.parts"):
            about = "predictions by position, of an interrupted predict", "finish it, or delete it"
            self._may(path, *about, self._all)

    def _in_copy(self, folder: Path) -> Which:
        return self._among(converted.open_copy(folder).ids)

    def _in_file(self, path: Path, *, skips: bool = False) -> Which:
        own = self._settings.data
        if path.suffix.lower() not in FORMATS:
            return self._among(read_id_list(path, own, self._settings.contract.ids).ids)
        source = source_of(path, own.source)
        table = open_source(source, Path())
        names = table.column_names()
        if "canonical_id" in names:  # as predict writes it
            parts = columns_in_parts(table, ["canonical_id"])
            texts = (one["canonical_id"].to_pylist() for one in parts)
            return self._among(chain.from_iterable(texts))
        ways = [(data.model_copy(update={"source": source}), rules) for data, rules in self._ways]
        found = [self._has(*way) for way in ways if {*way[0].id_columns} <= {*names}]
        if not found and not skips:
            raise DataError(f"there is neither {own.place_of_ids} nor canonical_id")
        held: Which = np.logical_or.reduce([~self._all, *found])
        return held

    def run(self, folder: Path) -> None:
        """Search a party's folder of a run, and name what cannot be searched."""
        data, rules = self.runs[folder]
        may_have = self._table(data, rules) | self._has_changed(data, folder)
        may_have |= self.named(folder / "checkpoint", [rules])
        for path in sorted(one for one in folder.rglob("*") if one.name not in self._digests):
            if what := next((_UNSEARCHED[one] for one in _UNSEARCHED if path.match(one)), None):
                self._may(path, what, AGAIN, may_have)
        if any((left := folder.with_name(f".{folder.name}.exchanges")).glob("*")):
            about = "blinded ids of an interrupted alignment", "delete it if the run is given up"
            self._may(left, *about, may_have)

    def named(self, checkpoint: Path, rules: Iterable[Rules]) -> Which:
        """Search the files of a ``checkpoint`` folder that name rows by digests of their ids."""
        found, forms = ~self._all, [*map(self._forms, rules)]

        def among(which: Reader) -> Which:
            held: Which = np.logical_or.reduce([which(checkpoint, form) for form in forms])
            return held

        for name, (what, then, which) in self._digests.items():
            if (checkpoint / name).exists():
                found |= self._note(checkpoint / name, what, then, partial(among, which))
        return found

    def _has_changed(self, data: DataSettings, folder: Path) -> Which:
        """Say, the same for each id, whether a table may have changed since a run's start."""
        if isinstance(data.source, SqlSource):
            return self._all
        try:
            stamps = converted.stamps_of(data.source, self._settings.base_dir)
            began = (folder / "settings.yaml").stat().st_mtime_ns
        except _UNREADABLE:
            return self._all
        return self._all & any(changed > began for *_, changed in stamps)


def _key(data: DataSettings, rules: Rules) -> str:
    return f"{data.source!r} {data.id_columns} {rules}"


def _in_words(error: Exception) -> str:
    # A library's own words may quote a cell.
    return str(error) if isinstance(error, SplitveilError) else type(error).__name__
