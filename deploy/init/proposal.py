"""Puts together the settings that fit a party's table, and writes them with the reasons beside."""

import math
import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from splitveil.common.data.label_columns import others_in_words
from splitveil.common.data.settings import MAX_CLASSES
from splitveil.common.data.source_settings import not_expanded
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import SPARSE_FROM_ROWS
from splitveil.common.record.run_folder import storage_errors, write_text_atomically
from splitveil.common.run.contract import ACTIVE, NAME_CHARACTERS
from splitveil.common.text.visible_text import visible
from splitveil.common.text.wording import slug
from splitveil.deploy.init.choices import (
    Choices,
    OwnIds,
    Wishes,
    choose_features,
    choose_id,
    choose_label,
    described,
)
from splitveil.deploy.init.columns import Column
from splitveil.deploy.init.command import FILES, check_absent
from splitveil.deploy.init.tables import RawTable

LEAK_AUC = 0.6
TRAIN_SHARE = 0.8
_BATCHES = ((16_000, 1024), (2_000, 256), (500, 128), (0, 32))
_EPOCHS = ((5_000_000, 2), (500_000, 4), (50_000, 10), (0, 20))


class Sizes(NamedTuple):
    batch_size: int
    epochs: int
    min_aligned: int
    max_set_size: int
    warmup_steps: int


def recommended_sizes(num_rows: int, *, is_exact: bool = True) -> Sizes:
    """Return the sizes for a table whose rows are all common to both parties."""
    most = num_rows if is_exact else math.ceil(1.1 * num_rows)
    epochs, batch_size = _at(_EPOCHS, num_rows), _at(_BATCHES, num_rows)
    steps = epochs * math.ceil(TRAIN_SHARE * num_rows / batch_size)
    unit = 10 ** max(math.floor(math.log10(most)) - 1, 0)
    return Sizes(
        batch_size=batch_size,
        epochs=epochs,
        min_aligned=min(100, max(num_rows // 2, 1)),
        max_set_size=int(min(math.ceil(most / unit) * unit, 2**31)),
        warmup_steps=steps // 20,
    )


def _at(steps: tuple[tuple[int, int], ...], num_rows: int) -> int:
    return next(value for least, value in steps if num_rows >= least)


Role = Literal["active", "passive"]

_ROWS_PER_COUNT = 4000
_MOST_MIN_COUNT = 20
_WIDE_OPEN = 0o644


class Terms(NamedTuple):
    """The facts that a proposal needs beside the table."""

    role: Role
    folder: Path
    party: str = "passive"
    run_name: str | None = None  # by default the name of the file
    address: str = "127.0.0.1:50051"  # where the active party listens, the passive connects to


class Proposal(NamedTuple):
    """Everything that the templates name."""

    party: str
    run_name: str
    address: str
    source: Mapping[str, Any]
    path: str
    num_rows: int
    is_whole: bool
    choices: Choices
    sizes: Sizes
    ids: OwnIds
    leak_auc: float = LEAK_AUC
    learning_rate: float = 0.004
    train: float = TRAIN_SHARE
    test: float = round(1 - TRAIN_SHARE, 2)

    @property
    def rows_in_words(self) -> str:
        return f"{'' if self.is_whole else 'about '}{self.num_rows:,} rows"

    @property
    def min_count(self) -> int:
        """Rows that a category needs for a slot of its own."""
        if not self.choices.categorical:
            return 1
        return max(1, min(_MOST_MIN_COUNT, self.num_rows // _ROWS_PER_COUNT))

    @property
    def weight_decay(self) -> float:
        """Return 0 where it would make every step touch all rows of a large embedding table."""
        columns = self.choices.categorical
        return 0.0 if any(column.distinct >= SPARSE_FROM_ROWS for column in columns) else 0.01

    @property
    def balance(self) -> str:
        label = self.choices.label
        if label is None:
            return ""
        without = label.unlabelled
        left_out = f" {without:,} rows without a label are left out." if without else ""
        if label.within is not None:
            bounds = f"{label.within.low:g} to {label.within.high:g}"
            return f"The labels are numbers, and so are the predictions, from {bounds}.{left_out}"
        if label.num_classes > 2:
            rarest = f"the rarest has {label.rarest_share:.1%} of the rows"
            return f"{label.num_classes} classes; {rarest}.{left_out}"
        found = f"{label.shares['positive']:.1%} of the labels are positive"
        if label.positive:
            guess = ", a guess: the rarer; --positive-label names another"
            texts = ", ".join(map(repr, label.positive)) + guess * label.positive_is_guessed
            found += f" ({texts}); {others_in_words(*label.others)}"
        return f"{found}.{left_out}"


def propose(table: RawTable, columns: Sequence[Column], wishes: Wishes, terms: Terms) -> Proposal:
    """Decide about every column of a table, and about the sizes of a run."""
    # Ids and classes are texts, with what stands beside their numbers.
    written = {**table.columns, **table.written}
    try:
        id_column, ids = choose_id(columns, written, wishes)
        few = {x.name for x in columns if x.distinct <= MAX_CLASSES}
        few_written = {name: x for name, x in table.written.items() if name in few}
        own = {x.name: x for x in described(few_written, wishes)}
        others = [own.get(x.name, x) for x in columns if x.name != id_column]
        label = choose_label(others, wishes) if terms.role == ACTIVE else None
    except SettingsError as error:
        others_are = "".join(f"; {name}: {why}" for name, why in table.left_out.items())
        raise SettingsError(f"{error}{others_are}") from error
    cells = dict(table.columns)
    if label is not None and label.within is None:
        cells[label.column] = written[label.column]
    choices = choose_features(
        columns, cells, wishes, id_column, label, table.index_columns, table.units
    )
    choices = choices._replace(left_out={**table.left_out, **choices.left_out})
    if label is None and not choices.features:
        one = "; --delimiter names the character between two cells" * (len(columns) == 1)
        raise SettingsError(
            f"{table.path}: no column is left for the model of a passive party{one}"
        )
    rows = table.num_rows
    rows -= round(rows * (ids.num_rows - ids.num_ids) / max(ids.num_rows, 1))
    if label is not None and label.unlabelled:
        if id_column is None or (set(label.gaps) - {""} and not choices.features):
            raise SettingsError(
                "--unlabelled-rows leave_out needs a column of ids, and features if a gap is "
                "not an empty cell"
            )
        rows -= round(rows * label.unlabelled / columns[0].num_rows)
    name = slug(table.path.name.partition(".")[0]).strip("-_.")[:NAME_CHARACTERS]
    return Proposal(
        party=terms.party,
        run_name=terms.run_name or name or "run",
        address=terms.address,
        source=table.source,
        path=not_expanded(os.path.relpath(table.path.absolute(), terms.folder.absolute())),
        num_rows=table.num_rows,
        is_whole=table.is_whole,
        choices=choices,
        sizes=recommended_sizes(rows, is_exact=table.is_whole),
        ids=ids,
    )


def texts_of(proposal: Proposal, role: Role) -> dict[str, str]:
    templates = _templates()
    return {
        name: templates.get_template(f"{name}.jinja").render(p=proposal) for name in FILES[role]
    }


def write_files(folder: Path, texts: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write the files, none of them if one is in the way."""
    if not force:
        check_absent(folder, texts)
    with storage_errors(folder, "cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        # The contract is shared; a party's own settings say what its table looks like.
        mode = _WIDE_OPEN if name == "contract.yaml" else 0o600
        write_text_atomically(folder / name, text, mode)
    return [folder / name for name in texts]


@cache
def _templates() -> Environment:
    """Return the templates, whose filters quote every value as YAML."""
    found = Environment(
        loader=PackageLoader("splitveil.deploy.init"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 (this is no HTML)
        keep_trailing_newline=True,
    )
    found.filters |= {
        "flow": _flow,
        "scalar": _flow,
        "quoted": partial(_flow, style='"'),
        "remark": lambda text: visible(str(text)),
    }
    return found


class _Dumper(yaml.SafeDumper):
    """Escapes line breaks and invisible characters of texts."""

    def represent_text(self, text: str) -> Any:
        if "\0" in text:
            raise SettingsError(
                f"{text!r}: settings cannot hold a NUL character, which this name of a column or "
                f"label has"
            )
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _flow(value: object, style: str | None = None) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(
        plain,
        Dumper=_Dumper,
        default_style=style,
        default_flow_style=True,
        width=10**6,
        allow_unicode=True,
    )
    return str(text).removesuffix("\n").removesuffix("\n...")
