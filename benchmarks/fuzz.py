"""Do mutated messages harm a session, its memory, or the run that goes on meanwhile?

    OMP_NUM_THREADS=1 python -m benchmarks.fuzz --messages 100000

Half of the mutants go straight to the handlers between two steps of a run, half over localhost on
four connections while it trains on. Ends with 1 where a handler had a fault, the run is not
bit-equal to an undisturbed one, or memory has grown by 64 MiB. The process that is measured holds
both parties and the senders.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.environment import free_port, print_environment, status_mib
from splitveil.active_party.grpc_server.service import ActiveService
from tests.support import mutations
from tests.support.runs import Parties, build_parties, run_in_process, write_example

MOST_GROWTH_MIB = 64
SENDERS = 4
WARM_UP = 2000
EPOCHS = ["contract.epochs=3"]
FAULTS = {"INTERNAL", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED"}


class FaultCount(logging.Handler):
    """Counts faults in handlers, and keeps the many refusals off the screen."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno >= logging.ERROR


class Disturbance:
    """The mutants of one run, and what came of them."""

    def __init__(self, parties: Parties, port: int, messages: int, seed: int) -> None:
        self.tape = mutations.Tape()
        self.statuses: Counter[tuple[str, str, str]] = Counter()
        self.memory_mib: list[float] = []
        self._parties = parties
        self._port = port
        self._each = messages // 2
        self._seed = seed
        self._executor = ThreadPoolExecutor(SENDERS)
        self._senders: list[Future[None]] = []
        self._answered: dict[str, list[bytes]] = {}
        self._began = 0.0

    def warm_up(self, service: ActiveService) -> None:
        """Let be allocated what every process allocates once, whatever comes."""
        self._answered = self.tape.requests()  # before the step that is due
        self.tape.is_full = True
        self._send(mutations.DirectSender(service, self._parties.run.contract), "", WARM_UP // 2)
        self._send_over_the_wire("", WARM_UP // 2)
        self.statuses.clear()
        self.memory_mib.append(status_mib("self", "VmRSS"))

    def straight(self, service: ActiveService) -> None:
        """Send half of them while the honest peer waits."""
        began = time.perf_counter()
        sender = mutations.DirectSender(service, self._parties.run.contract)
        self._send(sender, "handlers", self._each)
        self._note("handlers", began)

    def begin(self, service: ActiveService) -> None:
        """Begin to send the other half."""
        self._began = time.perf_counter()
        for share in [self._each // SENDERS] * SENDERS:
            sender = self._executor.submit(self._send_over_the_wire, "localhost", share)
            self._senders.append(sender)

    def finish(self, service: ActiveService) -> None:
        """Wait until all are sent."""
        for sender in self._senders:
            sender.result()
        self._note("localhost", self._began)
        self._executor.shutdown()

    def _note(self, way: str, began: float) -> None:
        print(f"{way}: {self._each} mutants in {time.perf_counter() - began:.0f} s")
        self.memory_mib.append(status_mib("self", "VmRSS"))

    def _send_over_the_wire(self, way: str, count: int) -> None:
        sender = mutations.WireSender(self._port)
        self._send(sender, way, count)
        sender.close()

    def _send(
        self, sender: mutations.DirectSender | mutations.WireSender, way: str, count: int
    ) -> None:
        self._seed += 1
        mutator = mutations.Mutator(self._answered, self._seed, self._parties.run.run_id)
        for (method, status), number in mutations.send_mutants(sender, mutator, count).items():
            self.statuses[way, method, status] += number


def is_bit_equal(parties: Parties, folder: Path) -> bool:
    alone = build_parties(folder, EPOCHS, EPOCHS)
    run_in_process(alone)
    expected, found = alone.weights(), parties.weights()
    return all(torch.equal(expected[name], found[name]) for name in expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print_environment("grpcio", "protobuf")
    faults = FaultCount()
    logging.getLogger().addHandler(faults)
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_example(folder)
        parties = build_parties(folder, EPOCHS, EPOCHS)
        disturbance = Disturbance(parties, port, arguments.messages, arguments.seed)
        acts = (disturbance.warm_up, disturbance.straight, disturbance.begin, disturbance.finish)
        steps = (5, 6, 7, 12)  # of twelve; before the fifth, held-out rows were evaluated
        at_steps = dict(zip(steps, acts, strict=True))
        mutations.run_disturbed(parties, port, disturbance.tape, at_steps)
        equal = is_bit_equal(parties, folder)
    for (way, method, status), count in sorted(disturbance.statuses.items()):
        print(f"  {way:10} {method:10} {status:20} {count}")
    growth = max(disturbance.memory_mib) - disturbance.memory_mib[0]
    bad = sum(n for (_, _, status), n in disturbance.statuses.items() if status in FAULTS)
    print(f"memory grew by {growth:.1f} MiB; faults: {faults.count}, by status {bad}")
    print("the run is bit-equal to an undisturbed one" if equal else "THE RUN WAS CHANGED")
    return int(not equal or bad > 0 or faults.count > 0 or growth >= MOST_GROWTH_MIB)


if __name__ == "__main__":
    sys.exit(main())
