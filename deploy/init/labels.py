"""Decides how labels are read: as one of two classes, of several, or as numbers."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from decimal import Decimal
from difflib import SequenceMatcher
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.label_columns import places_of
from splitveil.common.data.settings import MAX_CLASSES, class_key
from splitveil.common.errors import SettingsError
from splitveil.common.text.wording import suggest
from splitveil.deploy.init.columns import Column, as_text, without_gaps

POSITIVE_WORDS = ("1", "yes", "true", "y", "t", "positive", "pos", "ja", "j", "oui", "si", "sí")
NEGATIVE_WORDS = ("0", "no", "false", "n", "f", "negative", "neg", "nein", "non")

_MANTISSAS = (1, 2, 5, 10)
_RARE = 0.05
_FEW_ROWS = 2
_AS_WRITTEN = "--as-written takes all labels as they are"


class Within(NamedTuple):
    """The bounds of labels that are numbers."""

    low: float
    high: float
    is_chosen: bool  # by the user; otherwise proposed after a look at the labels
    holds_all: bool

    @property
    def outside(self) -> str:
        """The treatment of a label outside the range; a proposed range refuses none."""
        return "refused" if self.is_chosen and self.holds_all else "clipped"


class Label(NamedTuple):
    """The label column, and how its cells are read."""

    column: str
    positive: tuple[str, ...]  # texts that stand for 1; empty for 0 and 1, and several classes
    classes: tuple[str, ...] | int | None
    shares: Mapping[str, float]  # of the labelled rows, by class; empty for numbers
    within: Within | None = None  # the bounds of labels that are numbers; None for classes
    is_guessed: bool = False  # whether nothing but its two values speaks for the column
    positive_is_guessed: bool = False  # whether the text that stands for 1 is only the rarer one
    others: tuple[int, int] = (0, 0)  # how many other texts stand for 0, and in how many rows
    unlabelled: int | None = None  # rows left out for want of a label; None if none may be
    gaps: tuple[str, ...] = ()  # the texts of the labels that mean "no label"

    @property
    def doubt(self) -> str:
        if not self.is_guessed:
            return ""
        return "a guess: no column is named like labels, and no other has two values"

    @property
    def positive_setting(self) -> str | tuple[str, ...] | None:
        return self.positive[0] if len(self.positive) == 1 else self.positive or None

    @property
    def rarest_share(self) -> float:
        """The share of the rarest class."""
        return max(min(self.shares.values()), 1e-9)

    @property
    def num_classes(self) -> int:
        return 1 if self.within is not None else len(self.shares)


def is_of_numbers(column: Column) -> bool:
    """Say whether a column holds more different numbers than labels have classes."""
    is_number = column.kind in {"whole", "number"} and math.isfinite(column.low + column.high)
    return is_number and column.distinct > MAX_CLASSES


def classes_of(column: Column, meaning: Callable[[str], Hashable] = class_key) -> Counter[str]:
    """Return the rows of each class, by its most frequent text; equal numbers are one class."""
    names: dict[object, str] = {}
    rows = Counter[str]()
    for text, count in zip(column.values, column.counts, strict=True):
        rows[names.setdefault(meaning(text), text)] += count
    return rows


def _folded(text: str) -> Decimal | str:
    """Return a label without case, space and punctuation, but for signs and marks in numbers."""
    if isinstance(class_key(text), Decimal):
        return class_key(text)
    visible = "".join(x for x in text if unicodedata.category(x) != "Cf")
    plain = unicodedata.normalize("NFKC", visible).casefold().strip()
    kept = "".join(
        x
        for before, x, after in zip(" " + plain, plain, plain[1:] + " ", strict=False)
        if unicodedata.category(x)[0] not in "PZC"
        or (before.isdigit() and after.isdigit())
        or (x == "-" and " " in (before, after))
    )
    return class_key(kept or text)


_MEANT = {class_key(one): words for words in (NEGATIVE_WORDS, POSITIVE_WORDS) for one in words}


def yes_or_no(text: str) -> Hashable:
    key = _folded(text)
    return _MEANT.get(key, key)


def is_of_two(column: Column) -> bool:
    """Say whether a column's texts have two meanings."""
    found = set[Hashable]()
    for text in column.values:
        found.add(yes_or_no(text))
        if len(found) > 2:  # most columns of a wide table have hundreds
            return False
    return len(found) == 2


def _is_one_edit(one: str, other: str) -> bool:
    edits = [
        (one[a:b], other[c:d])
        for what, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
        if what != "equal"
    ]
    lost, new = map("".join, zip(*edits, strict=True))
    is_small = len(edits) == 1 or lost == new
    return is_small and max(len(lost), len(new)) == 1 and (lost + new).isalpha()


def spellings(column: Column, positive: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the texts that ``positive`` has to name because some mean the same.

    They are all texts if it names none and the labels have more than two meanings.
    """
    texts, meaning = classes_of(column), yes_or_no
    if len(folded := classes_of(column, meaning)) > 2:
        meaning = _folded
        folded = classes_of(column, meaning)
    if len(folded) in {1, len(texts)}:
        return ()
    likely = [_positive_of(folded)[0]] if len(folded) == 2 else texts
    wanted = set(map(meaning, positive or likely))
    return tuple(text for text in texts if meaning(text) in wanted)


def label_of(
    column: Column,
    positive: tuple[str, ...] = (),
    bounds: tuple[float, float] | None = None,
    *,
    leave_out: bool = False,
    as_written: bool = False,
) -> Label:
    """Return how labels are read; ``bounds`` are the user's, for labels that are numbers."""
    read, found = Label(column.name, (), None, {}), column.in_words()
    if leave_out:
        read = read._replace(unlabelled=column.missing, gaps=column.gaps)
    elif column.missing:
        found += "; --unlabelled-rows leave_out leaves these rows out"
    has_gaps = column.missing and not leave_out
    if bounds is not None:
        if has_gaps or column.kind not in {"whole", "number"}:
            raise SettingsError(
                f"--label-range: expected a number in every row of column {column.name!r}, found "
                f"{found}"
            )
        return read._replace(within=_within(column, *bounds, is_chosen=True))
    if not positive and not has_gaps and is_of_numbers(column):
        low, high = 0.0 - _rounded_up(-column.low), _rounded_up(column.high)
        return read._replace(within=_within(column, low, high, is_chosen=False))
    if has_gaps or not 2 <= len(classes_of(column)) <= MAX_CLASSES:
        raise SettingsError(
            f"--label-column {column.name}: expected a label of 2 to {MAX_CLASSES} classes in "
            f"every row, or a number, found {found}"
        )
    if not as_written:
        _check_spelling(column, positive)
    return _of_classes(read, column, positive)


def _check_spelling(column: Column, positive: tuple[str, ...]) -> None:
    """Ask about labels that seem to mean the same, and classes of next to no rows."""
    rows, alike = classes_of(column), spellings(column, positive)
    if not set(alike) <= set(positive):
        options = " ".join(f"--positive-label {quote(text)}" for text in alike)
        raise SettingsError(
            f"--label-column {column.name}: some of the labels {', '.join(map(repr, rows))} seem "
            f"to mean the same: write these alike"
            + (f", or say which stand for 1: {options}" if len(alike) < len(rows) else "")
            + f"; {_AS_WRITTEN}"
        )
    # Rare labels that differ from a frequent one by one letter, or by two exchanged ones.
    others = [text for text in rows if text not in positive]
    doubts = [
        f"{rare!r} ({rows[rare]:,} rows) beside {usual!r}"
        for rare in others
        for usual in others
        if rows[rare] <= _RARE * rows[usual] and len(rare) > 3 and _is_one_edit(rare, usual)
    ]
    if not positive:
        few = [text for text, n in rows.items() if n <= _FEW_ROWS and n <= _RARE * rows.total()]
        doubts += [f"{text!r} ({rows[text]} row{'s' * (rows[text] > 1)} in all)" for text in few]
    if doubts:
        raise SettingsError(
            f"--label-column {column.name}: expected no label by mistake, found "
            f"{', '.join(doubts[:20])}: correct or delete these rows; {_AS_WRITTEN}"
        )


def _of_classes(read: Label, column: Column, positive: tuple[str, ...]) -> Label:
    rows = classes_of(column)
    keys = {class_key(text): text for text in rows}
    if len(rows) > 2 and not positive:
        is_numbered = keys.keys() == set(map(Decimal, range(len(rows))))
        return read._replace(
            classes=len(rows) if is_numbered else tuple(sorted(rows)),
            shares={text: count / rows.total() for text, count in rows.items()},
        )
    likely, is_guessed = _positive_of(rows)
    named = positive or (likely,)
    for text in named:
        if class_key(text) not in keys:
            raise SettingsError(
                f"--positive-label: column {column.name!r} has no label {text!r}"
                f"{suggest(text, rows)}; it has {', '.join(map(repr, [*rows][:20]))}"
            )
    others = [rows[keys[key]] for key in keys.keys() - set(map(class_key, named))]
    share = sum(others) / rows.total()
    return read._replace(
        positive=() if not positive and keys.keys() == {0, 1} else named,
        positive_is_guessed=is_guessed and not positive,
        shares={"positive": 1 - share, "other": share},
        others=(len(others), sum(others)),
    )


def _within(column: Column, low: float, high: float, *, is_chosen: bool) -> Within:
    holds_all = low <= column.low and column.high <= high
    return Within(low, high, is_chosen, holds_all)


def _rounded_up(number: float) -> float:
    """Return the least 1, 2 or 5 times a power of ten that is not below a number; 0 up to 0.

    No more than the order of magnitude of the largest label is then in the proposal.
    """
    if number <= 0:
        return 0.0
    exponent = math.floor(math.log10(number)) - 1
    candidates = (float(f"{one}e{exponent + tens}") for tens in range(3) for one in _MANTISSAS)
    return next(found for found in candidates if found >= number)


def _positive_of(rows: Counter[str]) -> tuple[str, bool]:
    keys = {class_key(text.lower()): text for text in rows}
    said = [keys[word] for word in map(class_key, POSITIVE_WORDS) if word in keys]
    # 1 and 2 are the numbers of two classes, and neither is "yes".
    if len(said) == 1 and keys.keys() != {Decimal(1), Decimal(2)}:
        return said[0], False
    return rows.most_common()[-1][0], True


TELLTALE_AUC = 0.995  # a column with at least this AUC counts as another form of the label
_ENOUGH_ROWS = 5  # of a class, and of all others, below which columns separate them by chance


def gives_label_away(cells: Any, column: Column, classes: NDArray[np.int64]) -> bool:
    """Say whether a column's values or gaps tell a class of enough rows from all others."""
    text = as_text(cells)
    if text is None or column.kind in {"empty", "other"}:
        return False
    filled = without_gaps(text, column.gaps)
    has_value = pc.is_valid(filled).to_numpy(zero_copy_only=False)
    found = [has_value.astype(np.int64)]
    if column.kind in {"whole", "number"} and not column.looks_like_codes:
        numbers = pc.cast(filled, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        if _separates(np.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0), classes):
            return True
    if column.distinct <= min(MAX_CLASSES, column.present // _ENOUGH_ROWS):
        codes = pc.dictionary_encode(filled.combine_chunks()).indices
        found.append(pc.fill_null(codes, column.distinct).to_numpy(zero_copy_only=False))
    return any(_determine(codes, classes) for codes in found)


def _separates(numbers: NDArray[np.float64], classes: NDArray[np.int64]) -> bool:
    """Say whether the order of numbers tells a class from all others."""
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    rows = np.bincount(classes)
    pairs = rows * (len(classes) - rows)
    higher = np.bincount(classes, weights=ranks) - rows * (rows + 1) / 2
    return _is_telltale(higher / np.maximum(pairs, 1), rows)


def _determine(codes: NDArray[np.int64], classes: NDArray[np.int64]) -> bool:
    """Say whether codes tell a class from all others."""
    width, num_classes = int(codes.max()) + 1, int(classes.max()) + 1
    cells = np.bincount(classes * width + codes, minlength=num_classes * width)
    own = cells.reshape(num_classes, width)
    of_code, rows = own.sum(axis=0), own.sum(axis=1)
    others = of_code - own
    order = np.argsort(own / np.maximum(of_code, 1), axis=1)
    own, others = (np.take_along_axis(one, order, axis=1) for one in (own, others))
    pairs = rows * (len(classes) - rows)
    higher = (own * (np.cumsum(others, axis=1) - others / 2)).sum(axis=1)
    return _is_telltale(higher / np.maximum(pairs, 1), rows)


def _is_telltale(aucs: NDArray[np.float64], rows: NDArray[np.int64]) -> bool:
    is_enough = np.minimum(rows, rows.sum() - rows) >= _ENOUGH_ROWS
    return bool((np.maximum(aucs, 1 - aucs)[is_enough] >= TELLTALE_AUC).any())


def classes_of_rows(text: Any, label: Label) -> NDArray[np.int64]:
    """Return each row's class; of numbers, whether it is above the median."""
    if label.within is not None:
        numbers = pc.cast(text, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return np.asarray(numbers > np.median(numbers), np.int64)
    if label.classes is None:
        is_positive = pc.is_valid(places_of(text, label.positive or ("1",)))
        return np.asarray(is_positive.to_numpy(), np.int64)
    names = (
        [*map(str, range(label.num_classes))] if isinstance(label.classes, int) else label.classes
    )
    return np.asarray(places_of(text, names).to_numpy(), np.int64)
