"""What do sums by oblivious transfer cost each party, without the network between them?"""

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.environment import print_environment, spread, status_mib
from splitveil.common.oblivious_transfer import Receiver, Sender
from splitveil.common.oblivious_transfer.extension import MAX_TRANSFERS

Cost = tuple[float, float, int]  # CPU seconds, resident MiB beyond the imports, bytes sent


def be_sender(line: Connection, rows: int, width: int, targets: int) -> Cost:
    sender, sent = Sender(width, targets), 0
    line.send_bytes(sender.request)
    sender.accept(line.recv_bytes())
    for size in chunks(rows, width):
        answer = sender.answer(line.recv_bytes(), np.ones((size, targets), np.uint32))
        line.send_bytes(answer)
        sent += len(answer)
    line.send_bytes(sender.sums.tobytes())
    return time.process_time(), status_mib("self", "VmHWM"), len(sender.request) + sent


def be_receiver(line: Connection, rows: int, width: int, targets: int) -> Cost:
    rng, chosen = np.random.default_rng(0), np.zeros(width, np.int64)
    receiver = Receiver(width, line.recv_bytes(), targets)
    line.send_bytes(receiver.reply)
    sent = len(receiver.reply)
    for size in chunks(rows, width):
        bits = rng.integers(0, 2, (size, width), np.uint8).astype(np.bool_)
        message = receiver.extend(bits)
        line.send_bytes(message)
        receiver.take(line.recv_bytes())
        chosen += bits.sum(axis=0)
        sent += len(message)
    of_sender = np.frombuffer(line.recv_bytes(), np.uint32).reshape(width, targets)
    if not np.array_equal(receiver.sums - of_sender, np.repeat(chosen[:, None], targets, axis=1)):
        raise SystemExit("the sums are wrong")
    return time.process_time(), status_mib("self", "VmHWM"), sent


def chunks(rows: int, width: int) -> list[int]:
    most = MAX_TRANSFERS // width
    return [min(most, rows - first) for first in range(0, rows, most)]


def party(role: str, line: Connection, results: Connection, *sizes: int) -> None:
    seconds, resident = time.process_time(), status_mib("self", "VmRSS")
    cost = (be_sender if role == "sender" else be_receiver)(line, *sizes)
    results.send((cost[0] - seconds, cost[1] - resident, cost[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 20_000), ("width", 128), ("targets", 1), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print_environment("cryptography", "blake3")
    spawn, costs = multiprocessing.get_context("spawn"), dict[str, list[Cost]]()
    for _ in range(given.runs):
        lines, running = spawn.Pipe(), []
        for role, line in zip(("sender", "receiver"), lines, strict=True):
            results, at_party = spawn.Pipe(duplex=False)
            sizes = (given.rows, given.width, given.targets)
            process = spawn.Process(target=party, args=(role, line, at_party, *sizes))
            process.start()
            running.append((role, process, results))
        for role, process, results in running:
            costs.setdefault(role, []).append(results.recv())
            process.join()
    for role, of_runs in costs.items():
        seconds, resident, sent = (list(values) for values in zip(*of_runs, strict=True))
        print(
            f"{role}: {spread(seconds, 2)} CPU s, {spread(resident, 0)} MiB beyond the imports, "
            f"sends {sent[0] / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
