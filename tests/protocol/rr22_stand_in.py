"""Stands in for the worker of the engine rr22: the same task, in the clear, over the same ports.

Run with ``python -I``, as the worker is. Each side dials the other one, as spu's do, and sends its
ids. The file ``behaviour`` beside this script's copy says what else it does.
"""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


def everything(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def dial(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((HOST, port))
        except OSError:
            time.sleep(0.01)


def main(behaviour: str) -> None:
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    if behaviour == "fails":
        raise SystemExit("RuntimeError: no such protocol")
    if behaviour == "is silent":
        Path(os.environ["TMPDIR"], "..", "stand-in.pid").write_text(str(os.getpid()))
        time.sleep(3600)
    rank, ports = task["rank"], task["ports"]
    own = Path(task["ids"]).read_text().split()[1:]
    found: list[bytes] = []

    def listen() -> None:
        with socket.create_server((HOST, ports[rank])) as server:
            connection, _ = server.accept()
            found.append(everything(connection))

    listening = threading.Thread(target=listen)
    listening.start()
    with dial(ports[1 - rank]) as connection:
        connection.sendall("\n".join(own).encode())
        connection.shutdown(socket.SHUT_WR)
        listening.join()
    common = sorted(set(own) & set(found[0].decode().split()))
    if behaviour == "invents":
        common.append("A" * 22)
    if behaviour == "repeats":
        common.append(common[0])
    if behaviour == "misses":
        common.pop()
    if behaviour == "writes no column":
        common = []
    header = [] if behaviour == "writes no column" else ["id"]
    if behaviour != "writes nothing":
        Path(task["common"]).write_text(
            "\n".join([*header, *(f'"{one}"' for one in common)]) + "\n"
        )


if __name__ == "__main__":
    main(Path(__file__).with_name("behaviour").read_text())
