"""Leaves the results of a run, and measures and reports, which may fail without harm to them."""

import logging
from dataclasses import replace
from pathlib import Path

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import PeerEndedForGood, SplitveilError
from splitveil.common.record.assessment import print_summary
from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.run_folder import mark_as_ended
from splitveil.common.record.run_record import Summary, provenance_of_process, write_summary
from splitveil.common.record.transcript import Transcript
from splitveil.common.text.version import VERSION
from splitveil.passive_party.bottom_trainer import BottomTrainer
from splitveil.passive_party.exposure_plan import remedy_of
from splitveil.passive_party.feature_exposure import Sample, SentInEpochs, measure_exposure
from splitveil.passive_party.information_value import information_values
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings

_logger = logging.getLogger(__name__)


def try_to_measure(
    folder: Path,
    trainer: BottomTrainer,
    encoder: FeatureEncoder,
    own_rows: int,
    sample: Sample | None,
    of_epochs: SentInEpochs | None = None,
    settings: PassiveSettings | None = None,
) -> None:
    """Write what activations reveal, and with settings what fewer numbers would have revealed."""
    from splitveil.passive_party.report_page import write_exposure  # noqa: PLC0415

    try:
        with ProgressBar("measuring what the columns have given away"):
            found = measure_exposure(trainer, encoder, own_rows, sample, of_epochs)
            if found is not None and sample is not None and settings is not None:
                found = replace(found, remedy=remedy_of(settings, trainer, encoder, sample, found))
        if found is not None:
            write_exposure(folder, found)
            # By itself: no release that the peer makes up may keep the rest from being written.
            values = information_values(trainer, encoder)
            write_exposure(folder, replace(found, values=values))
    except SplitveilError as error:  # a full disk needs no traceback
        _logger.error("%s", error)
    except Exception:
        _logger.exception("what the activations reveal of the features could not be measured")


def try_to_measure_run(
    folder: Path,
    run: PassiveRun,
    encoder: FeatureEncoder | None,
    own_rows: int,
    recorder: PassiveRecorder,
    settings: PassiveSettings | None = None,
) -> None:
    """Write what the activations of a run reveal, whose recorder is closed."""
    if run.trainer is not None and encoder is not None:
        sample, of_epochs = recorder.sample, recorder.sent_in_epochs()
        try_to_measure(folder, run.trainer, encoder, own_rows, sample, of_epochs, settings)


def try_to_report(folder: Path) -> None:
    # A run need not wait for what its report is made with, nor hold it in memory.
    from splitveil.passive_party.report_page import write_passive_report  # noqa: PLC0415

    try:
        _logger.info("report written to %s", write_passive_report(folder))
    except SplitveilError as error:
        _logger.error("%s; once the cause is gone: splitveil report %s", error, folder)
    except Exception:
        _logger.exception("the report could not be written: splitveil report %s", folder)


def leave_summary(
    folder: Path,
    recorded: Summary,
    transcript: Transcript | None,
    stopped: PeerEndedForGood | None,
    device: str,
) -> None:
    """Write and print the figures: what is measured and reported afterwards may take longer."""
    summary = replace(
        recorded,
        transcript=None if transcript is None else transcript.summary(),
        version=VERSION,
        provenance=provenance_of_process(device),
    )
    write_summary(folder, summary)
    if stopped is not None:
        mark_as_ended(folder, {"ended_by": "the active party"})
    print_summary("passive party", summary)
    _logger.info("done: model and summary are in %s; the report follows", folder)
