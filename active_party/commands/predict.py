"""``splitveil predict``: predicts every id of a file with the trained model."""

import argparse
import logging
from contextlib import ExitStack

from splitveil.active_party.predict.batch import (
    BatchPrediction,
    BatchResult,
    Parts,
    PredictionPlan,
    check_lengths,
)
from splitveil.active_party.predict.predictor import Predictor, log_security, open_predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.label_kinds import kind_of
from splitveil.common.data.converted import stamps_of
from splitveil.common.data.table_files import read_id_list
from splitveil.common.errors import Interrupted, PeerError
from splitveil.common.party import command_line
from splitveil.common.party.arguments import print_json
from splitveil.common.party.interruption import Interruption
from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.run_folder import claimed, inner_folder
from splitveil.common.record.table_output import check_output
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE

logger = logging.getLogger(__name__)


def predict(parsed: argparse.Namespace) -> None:
    interruption = Interruption()
    interruption.install()
    settings: ActiveSettings = parsed.loaded
    tables = [parsed.ids, parsed.data or parsed.ids]
    if parsed.output.exists():
        tables += [path for path, *_ in stamps_of(settings.data.source, settings.base_dir)]
    check_output(parsed.output, tables)
    log_security(settings)
    device = command_line.prepare(settings)
    ids, written = read_id_list(parsed.ids, settings.data, settings.contract.ids)
    check_lengths(ids, str(parsed.ids))
    folder = inner_folder(settings.run_folder(ACTIVE), "predict")
    with ExitStack() as resources:
        resources.enter_context(claimed(folder, "another process predicts with this run"))
        transcript = None
        if settings.transcript:
            transcript = resources.enter_context(Transcript(folder, ACTIVE))
        predictor = resources.enter_context(
            open_predictor(
                settings,
                device,
                parsed.model,
                parsed.data,
                transcript,
                whole_table=parsed.whole_table,
            )
        )
        model, own = predictor.model, predictor.own_rows
        logger.info(
            "predicting %s ids with the %s top model of %s",
            f"{len(ids):,}",
            model.kind,
            model.identity,
        )
        source = "" if own is None else own.source
        said = PredictionPlan(f"{model.kind}, {model.identity}", source, kind_of(settings.data))
        parts = Parts(parsed.output, said, ids, written)
        batch = BatchPrediction(predictor, settings.contract, settings.reconnect, interruption)
        with ProgressBar("predicting", total=len(ids)) as progress:
            try:
                result = batch.run(parts, progress.advance)
            except (Interrupted, PeerError):
                logger.info("the same command goes on with the parts in %s", parts.folder)
                raise
    _report(parsed, result, predictor)


def _report(parsed: argparse.Namespace, result: BatchResult, predictor: Predictor) -> None:
    for party, count in result.missing_at.items():
        if count:
            logger.warning("%s of the ids have no row at %s", f"{count:,}", party)
    counts = (f"{result.found:,}", f"{result.rows:,}")
    logger.info("%s of %s ids predicted: %s", *counts, parsed.output)
    model = predictor.model
    if parsed.json:
        print_json(
            {
                "output": str(parsed.output),
                "rows": result.rows,
                "found": result.found,
                "missing_at": result.missing_at,
                "resumed_rows": result.rows - result.asked_rows,
                "seconds": round(result.seconds, 3),
                "model": {
                    "kind": model.kind,
                    "run_id": model.identity.run_id,
                    "batch_number": model.identity.batch_number,
                },
            }
        )
