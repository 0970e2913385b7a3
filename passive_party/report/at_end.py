"""Measures and reports at the end of a run, whose results are safe even if that fails."""

import logging
from pathlib import Path

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import SplitveilError
from splitveil.passive_party.bottom_trainer import BottomTrainer
from splitveil.passive_party.feature_exposure import measure_exposure
from splitveil.passive_party.report.page import write_exposure, write_passive_report
from splitveil.passive_party.settings import PassiveReportSettings

_logger = logging.getLogger(__name__)


def try_to_measure(
    settings: PassiveReportSettings,
    folder: Path,
    trainer: BottomTrainer,
    encoder: FeatureEncoder,
    own_rows: int,
) -> None:
    """Write what the trained model's activations tell of this party's features.

    Args:
        settings: say how many rows are looked at.
        folder: the party's folder of the run.
        trainer: the bottom model with its features.
        encoder: of the features.
        own_rows: number of rows of this party's file.
    """
    try:
        found = measure_exposure(trainer, encoder, own_rows, settings.probe_rows)
        if found is not None:
            write_exposure(folder, found)
    except SplitveilError as error:  # a full disk needs no traceback
        _logger.error("%s", error)
    except Exception:
        _logger.exception("what the activations tell of the features could not be measured")


def try_to_report(folder: Path) -> None:
    """Write the report of a run that is over."""
    try:
        _logger.info("report written to %s", write_passive_report(folder))
    except SplitveilError as error:
        _logger.error("%s; once the cause is gone: splitveil passive report %s", error, folder)
    except Exception:
        _logger.exception("the report could not be written: splitveil passive report %s", folder)
