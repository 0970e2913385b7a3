"""Two real processes: a passive party without labels learns the leak AUC of its attacks."""

import json
from pathlib import Path
from typing import Any

from splitveil.common.privacy.attacks import LABEL_FREE
from tests.support.processes import Party, started
from tests.support.runs import write_example


def lines(party: Party, kind: str) -> list[dict[str, Any]]:
    text = (party.results() / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def test_every_epoch_is_audited_the_last_one_included(tmp_path: Path) -> None:
    write_example(tmp_path, rows=7500)
    with started(
        tmp_path,
        "contract.audits_allowed=true",
        "contract.batch_size=512",
        active=["allow_audits=true"],
        passive=["adversary={audit: true, queue_batches: 1024, max_cpu_share: null}"],
    ) as pair:
        assert pair.wait() == (0, 0), pair.outputs
        audits = lines(pair.passive, "audit")
        summary = json.loads((pair.passive.results() / "summary.json").read_text())
        attacks = set(summary["audit"]["cut"])
        assert {"norm", "spectral", "accumulated_spectral", "residual_energy"} < attacks
        assert attacks < set(LABEL_FREE)
        epochs, layers = 2, 2
        expected = epochs * len(attacks) * layers
        assert len(audits) == len(lines(pair.active, "audit")) == expected
        assert summary["audit"]["cut"]["accumulated_spectral"] > 0.9
        assert "leak" not in summary
        of_active = json.loads((pair.active.results() / "summary.json").read_text())
        assert of_active["audits_answered"] == expected
