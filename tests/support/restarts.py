"""Parties that are killed, stopped, and restarted with the same command, and their results."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save

from splitveil.common.record.metrics_log import OF_MONITOR
from tests.support import certificates
from tests.support.processes import Pair, Party, PartyName
from tests.support.runs import write_example
from tests.support.simulation import free_address


class Settings(NamedTuple):
    both: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    passive: tuple[str, ...] = ()

    def of(self, party: PartyName) -> tuple[str, ...]:
        own = self.active if party == "active" else self.passive
        return (*self.both, *own)


SHORT = Settings(
    both=(
        "contract.epochs=6",
        "contract.batch_size=32",
        "contract.checkpoint_steps=4",
    )
)
"""A run of some seconds, with a checkpoint every few steps."""

# ---- what a run leaves ----


class Outcome(NamedTuple):
    """All that must not depend on faults."""

    weights: dict[str, bytes]
    metrics: dict[str, list[str]]
    summary: dict[str, Any]


def outcome(runs: Path) -> Outcome:
    folders = {party: runs / "small" / party for party in ("active", "passive")}
    summary = json.loads((folders["active"] / "summary.json").read_text())
    return Outcome(
        # Without the metadata, which only a process writes.
        {p: save(load_file(at / "checkpoint/model.safetensors")) for p, at in folders.items()},
        {party: metrics_of(at) for party, at in folders.items()},
        {name: summary[name] for name in ("steps", "epochs", "test_auc", "test_loss", "ledger")},
    )


def metrics_of(folder: Path) -> list[str]:
    """Return the lines of a party's metrics without their times, in an order of their own.

    The attacks write theirs when they are ready, beside the training; an alignment that did not
    come to its end on both sides is noted again when it does.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] != "alignment"]
    plain = [{k: v for k, v in line.items() if k != "time_s"} for line in lines]
    return sorted(json.dumps(line, sort_keys=True) for line in plain)


def assert_same(found: Outcome, expected: Outcome, context: str = "") -> None:
    """Compare two runs bit for bit.

    An active party never waits for its leak monitor, so that one that is killed may lose the
    figures of its last batches; those that it has are the same.
    """
    for party in ("active", "passive"):
        one, other = Counter(found.metrics[party]), Counter(expected.metrics[party])
        if party == "active":
            batches = [line for line in one if '"kind": "leak"' in line]
            assert not Counter({line: one[line] for line in batches}) - other, context
            one, other = (
                Counter({line: n for line, n in lines.items() if not _of_monitor(line)})
                for lines in (one, other)
            )
        assert one == other, f"{context}\n{party}: {one - other} instead of {other - one}"
        assert found.weights[party] == expected.weights[party], f"{context}\n{party}'s weights"
    assert found.summary == expected.summary, context


def _of_monitor(line: str) -> bool:
    return json.loads(line)["kind"] in OF_MONITOR


# ---- processes ----


Between = Callable[[str], AbstractContextManager[Any]]
"""Puts something before the active party's address; what it gives has an ``address``."""


@contextmanager
def restartable(
    folder: Path, settings: Settings, log: str = "run", between: Between | None = None
) -> Iterator[Pair]:
    """Yield both parties at a free port, not started; one that still runs in the end is killed.

    ``between`` gives what stands between the two.
    """
    there = address = free_address()
    with ExitStack() as stack:
        if between is not None:
            there = stack.enter_context(between(address)).address
        where = f"listen={address}", f"connect={there}"
        own = settings.of("active"), settings.of("passive")
        active = Party("active", folder, where[0], *own[0], log=log, begin=False)
        passive = Party("passive", folder, where[1], *own[1], log=log, begin=False)
        with active, passive:
            yield Pair(active, passive)


def run_once(
    folder: Path, settings: Settings, between: Between | None = None, trusted: Path | None = None
) -> Outcome:
    """Write an example, let both parties run to their end, and return what they leave."""
    write_example(folder)
    if trusted is not None:
        certificates.use(trusted, folder)
    with restartable(folder, settings, between=between) as both:
        both.active.start()
        both.wait_until(lambda: "waiting for the passive party" in both.active.said)
        both.passive.start()
        assert both.wait() == (0, 0), both.outputs
    return outcome(folder / "runs")


def wait_for_line(both: Pair, line: int) -> None:
    """Wait until the active party has noted so much, and see to it that the run is not over."""
    both.wait_until(lambda: both.active.lines >= line)
    assert [party.exit_code for party in both] == [None, None], both.outputs
