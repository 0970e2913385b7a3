"""``torchrun`` without its open port; its exit code is the first of a rank that says more than 1.

python -m splitveil.common.party.torchrun --nproc-per-node 4 -m splitveil.passive_party run ...

Without a given port, and on several machines with every rendezvous but the static one, torch's own
launcher unpickles what anybody writes into a store that listens on all interfaces. Here one machine
needs no port, and the store of several listens only at ``--master-addr``, with content that nobody
unpickles.
"""

import ipaddress
import os
import shutil
import socket
import sys
import tempfile
import time
from typing import NoReturn

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from splitveil.common.party.workers import RANKS_FOLDER

_NAME = "splitveil"
_PORT = 29500  # unless one is given
_WITHIN_S = 600


class _Meeting(StaticTCPRendezvous):
    """The meeting point of the launchers of all machines."""

    def __init__(self, given: RendezvousParameters) -> None:
        where = parse_rendezvous_endpoint(given.endpoint, _PORT)
        super().__init__(
            *where, int(given.config["rank"]), given.max_nodes, given.run_id, _WITHIN_S
        )
        self._meeting: Store | None = None

    def get_backend(self) -> str:
        return _NAME

    def next_rendezvous(self) -> RendezvousInfo:
        host, port = self.master_addr, self.master_port
        if self.world_size == 1:
            self._meeting = self._meeting or HashStore()
        elif self._meeting is None:
            listening = None if self.rank else _listening(host, port)
            self._meeting = TCPStore(
                *(host, port, self.world_size, not self.rank, self.timeout),
                multi_tenant=True,
                master_listen_fd=listening,
            )
        store, where = PrefixStore(self.run_id, self._meeting), RendezvousStoreInfo(host, port)
        return RendezvousInfo(store, self.rank, self.world_size, where)


def _listening(host: str, port: int) -> int:
    """Listen at the named address; a cluster may learn the name a little later."""
    deadline = time.monotonic() + _WITHIN_S
    while True:
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                _refuse(f"--master-addr: {host}: {error}")
            time.sleep(1)
    if host != address[0] and ipaddress.ip_address(address[0]).is_loopback:
        _refuse(f"--master-addr: {host} is {address[0]} here, which no other machine reaches")
    try:
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        _refuse(f"--master-addr: cannot listen at {address[0]}, port {port}: {error}")


def _refuse(why: str) -> NoReturn:
    sys.stderr.write(f"{why}\n")
    sys.exit(2)


def main() -> None:
    given = parse_args(None)  # type: ignore[no-untyped-call]
    several = given.nnodes not in {"1", "1:1"}
    if several and not (given.nnodes.isdecimal() and given.rdzv_backend == "static"):
        _refuse("several machines need --nnodes, one number, --node-rank and --master-addr")
    if not (several and given.rdzv_endpoint):
        host = given.master_addr
        host = f"[{host}]" if ":" in host else host
        given.rdzv_endpoint = f"{host}:{given.master_port or _PORT}"
    given.rdzv_backend, given.rdzv_conf = _NAME, f"rank={given.node_rank}"
    given.standalone, given.node_rank = False, 0
    rendezvous_handler_registry.register(_NAME, _Meeting)
    os.environ[RANKS_FOLDER] = folder = tempfile.mkdtemp(prefix="splitveil-")
    try:
        run(given)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # Ranks that lose another one end with 1, and those that the launcher ends below 0.
        codes = [one.exitcode for one in error.failures.values()]
        sys.exit(next((code for code in codes if code > 1), 1))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
