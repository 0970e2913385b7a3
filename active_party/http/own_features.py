"""Uses this party's own features, as a program sends them or as its table has them.

Sent features are encoded as those of the party's file were; the fallback model predicts from
either.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from splitveil.active_party.http.batcher import IdQuestion
from splitveil.active_party.http.programs import Unusable
from splitveil.active_party.predict.predictor import Predictions
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind, kind_of
from splitveil.active_party.training.own_models import build_alone, predictions_alone
from splitveil.common.data.features import UNKNOWN_SLOT, FeatureEncoder, Features
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sources import ColumnsInMemory, list_rows
from splitveil.common.data.stored_ids import ABSENT
from splitveil.common.data.table import Table, table_of
from splitveil.common.data.table_files import settings_for, unknown_categories, unseen_numbers
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import ServedRows
from splitveil.common.record.model_files import ALONE, TrainedModel
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.messages import ModelIdentity

logger = logging.getLogger(__name__)

_KINDS = {
    frozenset({str}): pa.string(),
    frozenset({list}): pa.list_(pa.string()),
    frozenset({int}): pa.int64(),
}


_Kinds = tuple[tuple[frozenset[type], ...], str]  # the types of values, and their words
_TEXTS = frozenset({str})
_NUMBERS: frozenset[type] = frozenset({int, float})
_NUMBER: _Kinds = (_NUMBERS, _TEXTS), "numbers, or texts that are numbers"
_CATEGORY: _Kinds = (_NUMBERS, _TEXTS), "texts, or numbers that stand for them"
_TIME: _Kinds = (_TEXTS,), "times as texts"
_LIST: _Kinds = (frozenset({list}), _TEXTS), "lists of texts, or texts"
_TOKENS: _Kinds = _LIST[0], "lists of whole numbers, or texts"
_OF_KINDS = (_NUMBER, _CATEGORY, _TIME, _LIST, _CATEGORY, _TOKENS)


class GivenFeatures:
    def __init__(self, settings: DataSettings, encoder: FeatureEncoder | None) -> None:
        self._encoder = encoder
        self._num_suspect = 0
        # No id is read: the request names the rows.
        self._settings = settings_for(settings, settings.source, encoder).model_copy(
            update={"id_column": None}
        )
        chosen = self._settings.features
        self._expected: dict[str, _Kinds] = {}
        if encoder is not None and chosen is not None:
            plain = (chosen.numeric, chosen.categorical, chosen.timestamps, chosen.lists)
            texts = tuple(column.name for column in encoder.sequences if column.tokenizer)
            tokens = tuple(column.name for column in encoder.sequences if not column.tokenizer)
            kinds = (*plain, texts, tokens)
            for names, expected in zip(kinds, _OF_KINDS, strict=True):
                self._expected |= dict.fromkeys(names, expected)
        self.columns = tuple(self._expected)
        """The names of all columns that a request has to give."""
        self.num_lists = sum(_LIST[0][0] in types for types, _ in self._expected.values())

    def of_rows(self, rows: Sequence[Mapping[str, Any]], num_ids: int) -> Features:
        """Encode rows, each with a value or None by column, of at least one id."""
        if len(rows) != num_ids:
            raise Unusable(f"features: expected {num_ids} rows, one for each id, got {len(rows)}")
        if self._encoder is None:
            raise Unusable("features: the model has no features of this party")
        # First, since a table of all names in all rows grows with the product of both.
        if not all(row.keys() <= self._expected.keys() for row in rows):
            raise Unusable(f"features: expected only these columns: {', '.join(self.columns)}")
        for name in self.columns:
            lacking = [number for number, row in enumerate(rows, start=1) if name not in row]
            if lacking and len(lacking) < len(rows):
                raise Unusable(
                    f"features: column {name!r}: missing in {list_rows(lacking)}; expected null "
                    f"where there is no value"
                )
        if missing := [name for name in self.columns if name not in rows[0]]:
            raise Unusable(f"features: columns are missing: {', '.join(missing)}")
        cells = {name: self._cells(name, [row[name] for row in rows]) for name in self.columns}
        try:
            table = table_of(ColumnsInMemory("features", cells), self._settings)
            features = self._encoder.transform(table, np.arange(len(table)))
        except DataError as error:
            raise Unusable(str(error)) from error
        self._judge(self._encoder, table, features.categorical)
        return features

    def _judge(self, encoder: FeatureEncoder, table: Table, slots: torch.Tensor | None) -> None:
        """Refuse new gaps, if the settings say so, and log what no training row had."""
        found = list(unseen_numbers(encoder, table, self._settings.features))
        if refused := [sentence for level, sentence in found if level == logging.ERROR]:
            raise Unusable("\n".join(refused))
        if encoder.lists or (slots is not None and UNKNOWN_SLOT in slots):
            found += unknown_categories(encoder, table, self._settings.features)
        self._num_suspect += bool(found)
        if found and self._num_suspect.bit_count() == 1:  # at each doubling: programs ask all day
            for _, sentence in found:
                logger.warning("%s", sentence)

    def _cells(self, name: str, values: Sequence[Any]) -> Any:
        expected = self._expected[name]
        types, words = expected
        if expected is _TOKENS:
            # A whole number is the text of its digits; a bool is none.
            values = [
                [str(part) if type(part) is int else part for part in one]
                if isinstance(one, list)
                else one
                for one in values
            ]
        kinds = frozenset(map(_kind, values)) - {type(None)}
        if kinds and not any(kinds <= allowed for allowed in types):
            raise Unusable(f"features: column {name!r}: expected {words}")
        # A column of gaps has the type that its kind suggests: times and texts are not numbers.
        of_gaps = pa.float64() if expected is _NUMBER else pa.string()
        kind = _KINDS.get(kinds, pa.float64()) if kinds else of_gaps
        try:
            return pa.chunked_array([pa.array(values, kind)])
        except (pa.ArrowException, OverflowError) as error:
            raise Unusable(f"features: column {name!r}: a number is too large") from error


class Fallback:
    """Answers ids from this party's own features. Several threads may use it."""

    def __init__(
        self, model: nn.Module, own_rows: ServedRows, labels: LabelKind = CLASS_LABELS
    ) -> None:
        self._model = model.eval()
        self._own_rows = own_rows
        self._labels = labels

    @classmethod
    def load(
        cls, settings: ActiveSettings, own_rows: ServedRows | None, joint: ModelIdentity
    ) -> "Fallback":
        folder = settings.run_folder(ACTIVE)
        if own_rows is None:
            raise SettingsError("serving.fallback: this party has no features of its own")
        if not (folder / "checkpoint" / ALONE).exists():
            raise SettingsError(
                f"serving.fallback: {folder} has no {ALONE}: only a run that was finished with "
                f"serving.fallback leaves one"
            )
        trained = TrainedModel.open(folder, settings.contract, ALONE)
        if trained.identity != joint:
            raise SettingsError(
                f"serving.fallback: {ALONE} is of {trained.identity}, the joint model of {joint}"
            )
        num_classes, seed = settings.data.num_classes, settings.model_seed
        model = build_alone(own_rows.encoder, num_classes, seed)
        trained.put_into(model)
        return cls(model, own_rows, kind_of(settings.data))

    def predict(self, question: IdQuestion, at: NDArray[np.int64]) -> Predictions:
        """Predict some of a question's ids. Shapes: ``at`` (rows,)."""
        if question.own is not None:
            found = np.ones(len(at), np.bool_)
            own = question.own.rows(torch.from_numpy(at))
        else:
            rows = self._own_rows.rows_of([question.ids[index] for index in at])
            found = rows != ABSENT
            own = self._own_rows.features_of(rows[found]).to("cpu")
        known = np.empty(0, np.float32)
        if found.any():
            known = predictions_alone(self._model, own, self._labels)
        probabilities = np.full((len(at), *known.shape[1:]), np.nan, np.float32)
        if found.any():
            probabilities[found] = known
        return Predictions(probabilities, found, {})


def _kind(value: Any) -> type:
    is_of_texts = not isinstance(value, list) or all(isinstance(part, str) for part in value)
    return type(value) if is_of_texts else object
