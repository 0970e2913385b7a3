"""``splitveil passive report``: writes the page of a run."""

import argparse
import logging

from splitveil.common.party.json_output import print_json
from splitveil.passive_party.report_page import write_passive_report

logger = logging.getLogger("splitveil.passive_party")


def report(parsed: argparse.Namespace) -> None:
    written = write_passive_report(parsed.run_dir, parsed.output)
    if parsed.json:
        print_json({"report": str(written)})
    logger.info("report written to %s", written)
