"""A slow line between two parties on one machine, for `benchmarks.whole_run`."""

import asyncio
import math
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from benchmarks.environment import free_port


class Line(NamedTuple):
    """A line between the two parties; None stands for the loopback."""

    delay_s: float = 0.0
    bytes_per_s: float = math.inf
    carried: Any = None
    """A shared integer to which the bytes of both directions are added."""


@contextmanager
def between(port: int, line: Line | None) -> Iterator[int]:
    """Yield the port that leads to another one over a line."""
    if line is None:
        yield port
        return
    here = free_port()
    process = multiprocessing.Process(target=lambda: asyncio.run(relay(here, port, line)))
    process.start()
    try:
        yield here
    finally:
        process.kill()
        process.join()


async def relay(here: int, port: int, line: Line) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(carry(reader, there[1], line), carry(there[0], writer, line))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", here)
    await server.serve_forever()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line) -> None:
    """Pass on each piece when the line has sent it and what came before, and it has arrived."""
    now, free_at = asyncio.get_running_loop().time, 0.0
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - now()))
            if not data:
                return
            writer.write(data)

    delivery = asyncio.create_task(deliver())
    data = b"-"
    while data:
        data = await reader.read(2**16)
        if line.carried is not None:
            with line.carried.get_lock():
                line.carried.value += len(data)
        free_at = max(free_at, now()) + len(data) / line.bytes_per_s
        under_way.put_nowait((free_at + line.delay_s, data))
    await delivery
    writer.close()
