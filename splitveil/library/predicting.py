"""Predicts with the model of a run whose parties are all here: nothing crosses a network.

This process does the work of ``splitveil predict`` and ``splitveil serve passive.yaml``, with the
same bits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pyarrow import parquet

from splitveil.active_party.predict.embed_client import EmbedClient
from splitveil.active_party.predict.predictor import JointModel, ModelChoice, Predictions, Predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.errors import OtherModel, SettingsError
from splitveil.common.models.device import restoring_devices
from splitveil.common.party.command_line import device_of
from splitveil.common.party.party_data import ServedRows
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.library.frames import Frame, Row, frame
from splitveil.library.loading import Scratch
from splitveil.library.own_data import as_table, check_rows_correspond
from splitveil.library.runs import Run
from splitveil.library.trained import as_text, folders_of, own_modules, settings_of
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.passive_party.settings import PassiveSettings

MAX_IDS = 8192
"""Ids that are computed at a time."""


class LocalEmbedder:
    """A passive party's half of the model in this process, asked as if it were served elsewhere."""

    max_ids = MAX_IDS

    def __init__(self, party: str, served: ServedModel, model: ModelIdentity) -> None:
        self.party = party
        self._served = served
        self._model = model

    def submit(self, ids: Sequence[str]) -> "Future[Embedded]":
        answer: Future[Embedded] = Future()
        known, values = self._served.embed(ids)
        answer.set_result(Embedded(known, torch.as_tensor(values)))
        return answer

    def check_model(self) -> None:
        if self._served.identity != self._model:
            raise OtherModel(
                f"{self.party}: expected the model of {self._model}, got that of "
                f"{self._served.identity}"
            )

    def close(self) -> None: ...


@restoring_devices()
def predict(
    run: Run | str | Path,
    ids: Iterable[Any] | None = None,
    *,
    passive: Mapping[str, str | Path] | str | Path | None = None,
    tables: Mapping[str, Any] | None = None,
    base_dir: str | Path | None = None,
    model: ModelChoice | None = None,
) -> Frame:
    """Predict with the model of a run, whose parties' folders are all on this machine.

    Args:
        run: the run or its folder, with the active party's folder in it.
        ids: the ids to predict, in any form, those of several columns as tuples; by default all
            that the first passive party has.
        passive: the passive party's folder, or several folders by the parties' names; by default
            the folders beside the active party's.
        tables: other rows than those of the settings, by the name of the party (``active`` for the
            label owner): tables in memory as for ``simulate``, with the columns of the features and
            the id.
        base_dir: the folder of the parties' settings files; the paths of their data are relative to
            it. A simulated run knows it; for others the current folder is the default.
        model: ``trained``, ``refitted`` (see ``refit``) or ``best``; by default that of the
            settings.

    Returns:
        A data frame (a ``pyarrow.Table`` without pandas): ``id`` as given, ``canonical_id``,
        whether every party has a row of it (``found``), and ``probability``, or one column
        ``probability_<class>`` for each of several classes.

    Raises:
        SplitveilError: a model, table or setting cannot be used, or the halves are not of one
            training.
    """
    opened = run if isinstance(run, Run) else Run(run)
    base = opened.base_dir if base_dir is None else Path(base_dir)
    active = settings_of(ActiveSettings, opened.path / ACTIVE, base)
    names = active.contract.passive_parties
    folders = folders_of(opened.path, names, passive)
    others = {
        name: settings_of(PassiveSettings, folders[name], base, f"party={name}") for name in names
    }
    given = {name: as_table(table, name) for name, table in (tables or {}).items()}
    if unknown := sorted(given.keys() - {ACTIVE, *names}):
        expected = ", ".join([ACTIVE, *names])
        raise SettingsError(f"tables: {', '.join(unknown)}: expected {expected}")
    if given and active.data.id_column is None:
        check_rows_correspond(given)
    scratch = Scratch()
    paths = {name: scratch.path / f"{name}.parquet" for name in given}
    for name, table in given.items():
        parquet.write_table(table, paths[name])
    with own_modules(base):
        joint = JointModel.load(active, device_of(active), model)
        served = {
            name: ServedModel.load(one, device_of(one), paths.get(name))
            for name, one in others.items()
        }
    own = None
    if joint.encoder is not None:
        own = ServedRows.load(active, joint.encoder, paths.get(ACTIVE))
    clients = [LocalEmbedder(name, one, joint.identity) for name, one in served.items()]
    # They are asked like clients of parties elsewhere, and have nothing else of them.
    with Predictor(joint, cast("list[EmbedClient]", clients), own) as predictor:
        predictor.check_models()
        rows = served[names[0]].rows
        asked = rows.ids_at(rows.served()) if ids is None else list(ids)
        texts = list(map(as_text, asked))
        canonical = CanonicalForm(active.contract.ids).of(texts)
        # Whole numbers stay what they are: they join the list that they come from.
        shown = asked if all(isinstance(one, Integral) for one in asked) else texts
        found = _rows(predictor, canonical, active.data.class_names)
        return frame({"id": one, **row} for one, row in zip(shown, found, strict=True))


def _rows(predictor: Predictor, ids: Sequence[str], classes: Sequence[str]) -> Iterator[Row]:
    for start in range(0, len(ids), MAX_IDS):
        some = ids[start : start + MAX_IDS]
        answer: Predictions = predictor.predict(some)
        for one, is_found, values in zip(some, answer.found, answer.probabilities, strict=True):
            row: dict[str, object] = {"canonical_id": one, "found": bool(is_found)}
            names = [f"probability_{name}" for name in classes] or ["probability"]
            known = np.atleast_1d(values).tolist() if is_found else [None] * len(names)
            yield row | dict(zip(names, known, strict=True))
