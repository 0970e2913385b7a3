"""What a party of several processes is told by torchrun, and what it refuses."""

import argparse
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from splitveil.active_party.commands.program import parser
from splitveil.active_party.commands.run import run
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import Interrupted, SettingsError
from splitveil.common.models.device import torch_device
from splitveil.common.party import torchrun
from splitveil.common.party.command_line import prepare
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.party.workers import ONLY, RANKS_FOLDER, Rank, _private_file, act
from tests.support.runs import ACTIVE, write_example

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "10.0.0.1",
    RANKS_FOLDER: "/private",
}


def test_torchrun_says_which_process_this_is() -> None:
    assert Rank.of_environment(TORCHRUN) == Rank(5, 8, 1, 4, 2)
    assert Rank.of_environment({}) == ONLY
    for missing in ("RANK", "MASTER_ADDR"):  # a variable of another program makes no group
        variables = {name: text for name, text in TORCHRUN.items() if name != missing}
        assert Rank.of_environment(variables) == ONLY
    for name, text in (("WORLD_SIZE", "two"), ("WORLD_SIZE", "1_0"), ("RANK", "-1")):
        with pytest.raises(SettingsError, match=rf"^{name}: expected a whole number .*'{text}'$"):
            Rank.of_environment(TORCHRUN | {name: text})
    without = {name: text for name, text in TORCHRUN.items() if name != RANKS_FOLDER}
    with pytest.raises(SettingsError, match=r"python -m splitveil\.common\.party\.torchrun"):
        Rank.of_environment(without)


def test_processes_on_one_machine_meet_in_the_launcher_s_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv(RANKS_FOLDER, "/private")
    assert _private_file(Rank(0, 2, 0, 2, 3)) == Path("/private/3")
    assert _private_file(Rank(0, 4, 0, 2, 3)) is None


@pytest.mark.parametrize(
    "words",
    [
        ("--nnodes", "1:4"),
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29500"),
        ("--nnodes", "2", "--rdzv-backend", "etcd-v2"),
        ("--nnodes", "2", "--master-addr", "localhost"),
        ("--nnodes", "2", "--master-addr", "192.0.2.1"),
    ],
)
def test_the_launcher_refuses_what_others_could_write_to_or_reach_in_vain(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> None:
        torchrun._listening(words[-1], 29500)

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(sys, "argv", ["torchrun", *words, "party"])
    with pytest.raises(SystemExit) as ended:
        torchrun.main()
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("codes", "expected"),
    [({1: 1, 0: 5}, 5), ({1: 2, 0: -15}, 2), ({0: 1, 1: -9}, 1), ({1: -9}, 1), (None, 143)],
)
def test_torchrun_ends_as_the_first_rank_that_names_a_cause(
    codes: dict[int, int] | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: object) -> None:
        if codes is None:
            raise SignalException("stopped", signal.SIGTERM)
        failures = {rank: ProcessFailure(rank, 1, code, "") for rank, code in codes.items()}
        raise ChildFailedError("party", failures)

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(sys, "argv", ["torchrun", "party"])
    with pytest.raises(SystemExit) as ended:
        torchrun.main()
    assert ended.value.code == expected


def test_only_run_computes_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(parsed: argparse.Namespace) -> None:
        done.append(parsed.command)

    act(argparse.Namespace(command="check"), note)
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    act(argparse.Namespace(command="run"), note)
    with pytest.raises(SettingsError, match="check: torchrun has started 8 processes"):
        act(argparse.Namespace(command="check"), note)
    assert done == ["check", "run"]


def test_an_objective_of_several_models_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_example(tmp_path)
    path = tmp_path / "active.yaml"
    path.write_text(yaml.safe_dump(ACTIVE | {"defense": {"name": "gafm"}}))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    parsed = parser("splitveil active").parse_args(["run", str(path)])
    parsed.loaded = load_party_settings(ActiveSettings, path)
    with pytest.raises(SettingsError, match="defense: gafm"):
        run(parsed)


def test_processes_share_the_cores_of_their_machine(tmp_path: Path) -> None:
    write_example(tmp_path)
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml", ["torch_threads=null"])
    before = torch.get_num_threads()
    try:
        prepare(settings, Rank(1, 4096, 1, 4096))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [torch_device("auto", rank) for rank in (0, 1)] == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
    ]
    assert torch_device("cuda:0", 1) == torch.device("cuda:0")
    with pytest.raises(SettingsError, match=r"one of the 2 CUDA device\(s\).* got cuda:2"):
        torch_device("cuda", 2)


def test_before_a_signal_stops_a_run_the_workers_are_asked() -> None:
    interruption, asked = Interruption(), []
    interruption.before_stopping = lambda: asked.append(True)
    interruption.check()
    assert not asked
    interruption.signal_number = 15
    with pytest.raises(Interrupted):
        interruption.check()
    assert asked
