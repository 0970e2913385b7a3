"""Measures openmined-psi beside our alignment, in an environment of its own.

    python other_psi.py 100000

It runs without splitveil, since the package pins another version of protobuf. Client and server
are in one process and take turns; only the client learns the intersection. Prints one line of JSON
with the processor time of each, the bytes that each sends, and the largest resident memory of both
together.
"""

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import private_set_intersection.python as psi

_FALSE_POSITIVES = 1e-9


def main() -> None:
    """Align sets of so many ids, half in common, and print what it took."""
    num_ids = int(sys.argv[1])
    first = num_ids // 2
    server_ids = [f"customer-{number:09d}" for number in range(num_ids)]
    client_ids = [f"customer-{number:09d}" for number in range(first, first + num_ids)]
    client = psi.client.CreateWithNewKey(True)
    server = psi.server.CreateWithNewKey(True)
    cpu_s = {"client": 0.0, "server": 0.0}

    def by(party: str, work: Any, *arguments: Any) -> Any:
        started = time.process_time()
        found = work(*arguments)
        cpu_s[party] += time.process_time() - started
        return found

    setup = by(
        "server",
        server.CreateSetupMessage,
        _FALSE_POSITIVES,
        num_ids,
        server_ids,
        psi.DataStructure.RAW,
    )
    request = by("client", client.CreateRequest, client_ids)
    response = by("server", server.ProcessRequest, request)
    common = by("client", client.GetIntersection, setup, response)
    sent = {
        "client": request.ByteSize(),
        "server": setup.ByteSize() + response.ByteSize(),
    }
    # Not ru_maxrss: Linux carries the parent's peak over into a new program.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    peak_mib = int(line.split()[1]) / 1024
    outcome = {
        "version": metadata.version("openmined_psi"),
        "cpu_s": cpu_s,
        "sent_bytes": sent,
        "peak_mib": peak_mib,
        "num_common": len(common),
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
