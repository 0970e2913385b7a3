"""Whoever reaches the ports of a party of several processes runs nothing there."""

import base64
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from torch._C._distributed_c10d import TCPStore

from tests.support.deployed import KUBERNETES, SYSTEMD, directives, services_of
from tests.support.loopback import listening
from tests.support.markdown import DOCUMENTS, ROOT, blocks
from tests.support.simulation import free_address
from tests.support.waiting import wait_until

LAUNCHER = "python -m splitveil.common.party.torchrun"
RANKS = KUBERNETES / "ranks"
DEPLOYED = (Path("docker-compose.gpu.yml"), SYSTEMD / "ranks.conf", RANKS / "kustomization.yaml")
PAGES = [
    *(one for one in DOCUMENTS if any(LAUNCHER in block.text for block in blocks(one))),
    *(ROOT / file for file in DEPLOYED),
]


def commands(path: Path) -> Iterator[str]:
    """Yield a shell's lines that start several processes, as they stand in a page or a file."""
    if path.suffix == ".md":
        lines = (line for block in blocks(path) for line in block.lines if LAUNCHER in line)
        # The party itself is not needed.
        yield from (re.sub(r"-m splitveil\.(\w+)_party", r"--no-python \1-party", x) for x in lines)
    elif path.suffix == ".yml":
        entrypoints = (one["entrypoint"][-1] for one in services_of(path.name).values())
        yield from (one.replace("$$", "$") for one in entrypoints if LAUNCHER in one)
    elif path.suffix == ".conf":
        (line,) = filter(None, directives(path)["ExecStart"])
        yield line.replace("/opt/splitveil/bin/", "").replace("%j", "active")
    else:
        patches = yaml.safe_load(path.read_text(encoding="utf-8"))["patches"]
        operations = yaml.safe_load(patches[1]["patch"])
        words = [one["value"] for one in operations if "/command/" in one["path"]]
        yield " ".join([*words, "active-party"])


def test_every_file_that_starts_several_processes_is_tried() -> None:
    candidates = [*DOCUMENTS, *ROOT.glob("*.yml"), *(ROOT / "deploy").rglob("*")]
    texts = (
        (one, one.read_bytes()) for one in candidates if one.is_file() and one.suffix != ".pyc"
    )
    starts = re.compile(rb"(-m |value: )splitveil\.common\.party\.torchrun")
    assert {one for one, text in texts if starts.search(text)} == set(PAGES)


def environments(path: Path, programs: Path) -> Iterator[dict[str, str]]:
    """Yield what the launchers of such a command find, one for each machine."""
    search = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    shared = {**os.environ, "PATH": search, "PYTHONPATH": str(ROOT), "GPUS": "2", "RANKS": "2"}
    if path.parent != RANKS:
        yield shared
        return
    job = yaml.safe_load((RANKS / "job.yaml").read_text(encoding="utf-8"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value", "") for one in container["env"]}
    host, port = free_address().rsplit(":", 1)
    variables |= {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port}
    for rank in range(int(variables["PET_NNODES"])):
        yield {**shared, **variables, "PET_NODE_RANK": str(rank)}


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)


def attack(address: str, proof: Path) -> None:
    """Write code into everything that a store on this machine holds."""
    code = base64.b64encode(pickle.dumps(Payload(f"touch {proof}"))).decode()
    store = TCPStore(
        *("127.0.0.1", int(address.rpartition(":")[2], 16)),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=20),
    )
    for key in store.list_keys():
        store.set(key, code)


@pytest.mark.skipif(sys.platform != "linux", reason="looks sockets up in /proc")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_nobody_runs_code_at_the_ports_of_a_launcher(path: Path, tmp_path: Path) -> None:
    """One machine has no port; several have one at the address that they were given."""
    proof, started = tmp_path / "proof", tmp_path / "started"
    for party in ("active", "passive"):
        program = tmp_path / f"{party}-party"
        program.write_text(f"#!/bin/sh\necho >> {started}\nexec sleep 600\n")
        program.chmod(0o700)
    lines = dict.fromkeys(commands(path))
    assert lines
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(
                subprocess.Popen(["sh", "-c", f"exec {line}"], env=env, start_new_session=True)
            )
            for line in (line.removeprefix("exec ") for line in lines)
            for env in environments(path, tmp_path)
        ]
        for launcher in launchers:
            stack.callback(os.killpg, launcher.pid, signal.SIGKILL)
        wait_until(lambda: started.is_file() and started.stat().st_size >= 2 * len(lines))
        addresses = [one for launcher in launchers for one in listening(launcher.pid)]
        for address in addresses:
            attack(address, proof)
        time.sleep(2)  # torch's own launcher reads its store ten times a second
        assert not proof.exists()
        assert len(addresses) == (path.parent == RANKS)
        assert all(one.startswith("0100007F:") for one in addresses), addresses
