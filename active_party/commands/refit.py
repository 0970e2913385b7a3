"""``splitveil refit``: fits another top model on the files of a finished run.

It asks no passive party and sends nothing, so it costs no privacy, whatever is tried and however
often. A label corrected since the run counts with its new value. The figures by group are measured
again, unless the model of the run is the one that predicts.
"""

import argparse
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from splitveil.active_party.ledger.account_book import indices_of, names_of
from splitveil.active_party.predict.predictor import load_top
from splitveil.active_party.results import read_activations, save_refitted
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import fitted_top, groups_of, known_rows
from splitveil.active_party.training.evaluation import (
    HeldOutPredictions,
    measure_groups,
    score_bins,
)
from splitveil.common.errors import DataError
from splitveil.common.models.settings import bins_of
from splitveil.common.party import command_line
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.figures import PredictionFigures
from splitveil.common.record.model_files import identity_metadata
from splitveil.common.record.run_record import find_summary, write_summary
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.sample_order import SPLITS, SampleOrder
from splitveil.common.text.visible_text import visible


class Refitted(NamedTuple):
    """The outcome of fitting a new top model; figures are of the test rows, None without any."""

    is_better: bool
    """True if it predicts the held-out rows better than the previous model, and was saved."""
    before: PredictionFigures | None
    after: PredictionFigures | None
    """Of the model that predicts from now on."""


def refit(parsed: argparse.Namespace) -> None:
    settings: ActiveSettings = parsed.loaded
    found = refit_again(settings, command_line.prepare(settings))
    was, now = ("no test rows" if one is None else f"test {one.in_short}" for one in found[1:])
    end = f"now {now}" if found.is_better else "it stays: the new one is no better on held-out rows"
    print(visible(f"{settings.contract.run_name}: the model had {was}; {end}"))


def refit_again(settings: ActiveSettings, device: torch.device) -> Refitted:
    """Fit a new top model, and save it if it is better on held-out training rows.

    Raises:
        SettingsError: there is no finished run with stored activations, or its contract or encoding
            differs.
        DataError: this party's table lacks the run's rows.
    """
    folder = settings.run_folder(ACTIVE)
    trained, model, _ = load_top(settings, "best")
    names, of_split, activations = read_activations(folder, trained.saved.metadata)
    data = PartyData.of(settings)
    found = indices_of(names, names_of(data.ids))
    kept = np.flatnonzero(found >= 0)  # rows may have been deleted since
    splits = {name: np.flatnonzero(of_split[kept] == one) for one, name in enumerate(SPLITS)}
    if len(splits["train"]) < 2:
        raise DataError(
            f"{data.table.source}: expected the training rows of the run, got "
            f"{len(splits['train'])} of {int((of_split == 0).sum())}"
        )
    order = SampleOrder(b"", splits["train"], settings.contract.batch_size)
    rows = AlignedRows(found[kept], splits, order, np.empty((0, 16), np.uint8))
    group_column = groups_of(settings, data)  # which may be refused, before anything is written
    encoder, features = data.encode(rows, trained.saved, bins_of(settings.top_model))
    known = known_rows(settings, data, rows, features, device)
    known = known.remembering(activations[torch.from_numpy(kept)])
    model.to(device)
    new = fitted_top(settings, encoder, known, torch.from_numpy(splits["train"]), model)
    before, after = (known.measure(one, splits["test"]) for one in (model, new))
    is_better, summary, test = new is not model, find_summary(folder), None
    if after is not None:
        at = torch.from_numpy(splits["test"])
        test = HeldOutPredictions(known.logits(new, at).cpu(), known.labels[at.to(device)].cpu())
    if is_better:
        of_run = identity_metadata(trained.identity, settings.contract)
        save_refitted(settings, folder, new, of_run | score_bins(known.kind, test))
    if summary is not None and summary.active is not None and test is not None:
        figures, of_test = summary.active.model, rows.file_rows[splits["test"]]
        if is_better:
            figures = replace(figures, refit=after)
        if settings.inference.model != "trained":
            groups = measure_groups(group_column, of_test, test)
            figures = replace(figures, groups=groups)
        write_summary(folder, replace(summary, active=replace(summary.active, model=figures)))
    return Refitted(is_better, before, after)
