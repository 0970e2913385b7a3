"""The test AUCs of several runs on a comparison page, with what the runs share."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from splitveil.active_party.report.paired import Comparison, Estimate, auc_estimate, compare
from splitveil.active_party.report.run_files import RunFiles
from splitveil.active_party.report.tables import figure
from splitveil.active_party.training.held_out import StoredPredictions, read_predictions

_ABSENT = "–"
_CLOSE = 1e-4
"""Difference of an AUC from the recorded one that rounding may make."""


class ComparedTests(NamedTuple):
    """The test AUCs of several runs."""

    aucs: tuple[str, ...]
    """Each run's, with its 95 % interval where its predictions were kept."""
    alone: tuple[str, ...]
    """Each run's active party alone; dashes where no such model was trained."""
    differences: tuple[str, ...]
    """Each run's less the first run's, with its paired interval where they share test rows."""
    sharing: str
    """A sentence about what the runs share with the first one."""


def compare_tests(runs: Sequence[RunFiles]) -> ComparedTests:
    predictions = [
        None
        if run.active.summary.of_active.model.test_number is not None
        else read_predictions(run.active.folder)
        for run in runs
    ]
    aucs = tuple(map(_auc, runs, predictions))
    models = [run.active.summary.of_active.model for run in runs]
    found = [compare(predictions[0], one) for one in predictions[1:]]
    differences = tuple(_difference(one.difference) for one in found)
    return ComparedTests(
        aucs,
        tuple(figure(model.test_auc_alone, 4) for model in models),
        ("(the first run)", *differences),
        _sharing(found),
    )


def rows_of_tests(compared: ComparedTests) -> Iterator[tuple[str, list[str]]]:
    yield "test AUC (95 % interval)", list(compared.aucs)
    yield "test AUC less that of the first run (paired 95 % interval)", list(compared.differences)
    if any(cell != _ABSENT for cell in compared.alone):
        yield "test AUC of the active party alone", list(compared.alone)


def _auc(run: RunFiles, predictions: StoredPredictions | None) -> str:
    recorded = run.active.summary.of_active.model.test_auc
    found = None if predictions is None else auc_estimate(predictions)
    if recorded is None or found is None or abs(found.value - recorded) > _CLOSE:
        return figure(recorded, 4)
    return found.in_words()


def _difference(found: Estimate | None) -> str:
    return "not comparable" if found is None else found.in_words(signed=True)


def _sharing(found: Sequence[Comparison]) -> str:
    said = list(dict.fromkeys(one.sharing for one in found))
    if len(said) == 1:
        return f"Every run has, compared with the first one: {_lowered(said[0])}"
    each = (f"run {number}: {_lowered(one.sharing)}" for number, one in enumerate(found, start=2))
    return f"Compared with the first run, {' '.join(each)}"


def _lowered(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
