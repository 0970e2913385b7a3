"""The local launcher and the shipped examples: real processes, real data, real gradients."""

import io
import json
import os
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import grpc
import pytest
from pydantic import TypeAdapter
from rich.console import Console

from splitveil import Run
from splitveil.active_party.report.comparison_table import comparison_table
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.figures import (
    AdjustedFigures,
    BeyondFigures,
    LeakBounds,
    LeakFigures,
    PredictionFigures,
    Spread,
)
from splitveil.common.record.run_record import ActiveFigures, ModelFigures, RunCounts, Summary
from splitveil.common.run.contract import Name
from splitveil.deploy.authority import PartyFolder
from splitveil.deploy.local import held_port
from splitveil.deploy.overrides import Overrides, parse_defense
from tests.support.programs import run_program
from tests.support.runs import write_example
from tests.system.conftest import SAME_SPLIT, LocalRun

PYTHON = (sys.executable, "-m")
BUDGET = (
    "active.defense.name=marvell",
    "active.run_budget={sum_kl: 0.01, adversary: knows class means only}",
)
ATTACKS = {"norm", "cosine", "spectral", "residual_energy"}
FIGURES = {"q95", "mean", "last_epoch", "random_q95"}
RUNS = ("breast_cancer-none", "breast_cancer-marvell-power_ratio-4")


def test_two_defenses_are_run_and_set_side_by_side(compared: LocalRun) -> None:
    assert compared.exit_code == 0, compared.output
    rows = re.findall(r"(?m)^(none|marvell power_ratio=4) +0\.\d{4} ", compared.output)
    assert rows == ["none", "marvell power_ratio=4"]
    logged = {int(number) for number in re.findall(r"epoch (\d+)", compared.output)}
    assert logged == {1, 2, 3, 4, 5, 6}
    for run in RUNS:  # the page is written again after all other files of both parties
        files = [one for one in (compared.runs_dir / run).rglob("*") if one.is_file()]
        newest = max(files, key=lambda one: one.stat().st_mtime_ns)
        assert newest == compared.runs_dir / run / "active" / "report.html"


@pytest.mark.parametrize("run_name", RUNS)
def test_both_summaries_hold_what_later_checks_read(compared: LocalRun, run_name: str) -> None:
    active = compared.summary(run_name, "active")
    passive = compared.summary(run_name, "passive")
    assert active["aligned_rows"] == passive["aligned_rows"] == 569
    assert active["epochs"] == passive["epochs"] == 6
    assert active["steps"] == passive["steps"] > 6 * 12
    assert active["test_auc"] > 0.9
    assert min(active[name] for name in ("test_loss", "train_loss", "steps_per_s")) > 0
    assert active["defense"]["name"] in run_name
    assert set(active["leak"]) == {"cut"}
    assert set(passive["leak"]) == {"cut", "first"}
    for attacks in (*active["leak"].values(), *passive["leak"].values()):
        assert set(attacks) == ATTACKS
        assert all(set(figures) == FIGURES for figures in attacks.values())
    assert active["leak_batches"]["left_out"] == passive["leak_batches"]["left_out"] == 0


def test_results_lie_in_each_party_s_folder_and_are_their_owner_s_alone(compared: LocalRun) -> None:
    """Weights, the ledger and digests of ids inform other users of labels and members."""
    pages = [*compared.runs_dir.glob("*.html")]
    folders = [compared.runs_dir / run / party for run in RUNS for party in ("active", "passive")]
    written = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert pages
    for folder in folders:
        for name in ("settings.yaml", "metrics.jsonl", "events.out.tfevents.*", "checkpoint*"):
            assert list(folder.glob(name)), name
    assert not [path for path in (*pages, *folders, *written) if path.stat().st_mode & 0o077]


def test_the_local_launcher_makes_certificates_where_an_example_has_none(
    compared: LocalRun,
) -> None:
    assert compared.exit_code == 0, compared.output
    assert compared.output.count("security: mtls as CN=") == 2 * 2
    authority = compared.runs_dir / ".trial-certificates"
    assert PartyFolder(authority / "active").certificate.is_file()


OWN_BOTTOM = """
from torch import nn

def bottom(shapes):
    return nn.Sequential(nn.Linear(shapes.numeric_dim, 4))
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return what two rehearsals with a user's own model, beside folders with our names, said."""
    folder = tmp_path_factory.mktemp("rehearsed")
    write_example(folder / "settings")
    (folder / "settings" / "my_models.py").write_text(OWN_BOTTOM)
    for name in ("common", "protos", "deploy", "active_party", "passive_party", "splitveil"):
        (folder / "here" / name).mkdir(parents=True)
        for module in ("__init__.py", "__main__.py", "local.py"):
            (folder / "here" / name / module).write_text(f"raise SystemExit('wrong {name}')")
    outputs = []
    for _ in range(2):
        done = run_program(
            # As the command itself is started: without the working directory on the module path.
            *(sys.executable, "-P", "-m", "splitveil", "local", str(folder / "settings")),
            *("--runs", str(folder / "runs"), "--set", "contract.epochs=1"),
            "passive.bottom_model={kind: custom, module: my_models:bottom}",
            cwd=folder / "here",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout
        outputs.append(done.stdout)
    return folder / "runs" / "small", outputs


def test_folders_of_the_user_with_our_names_are_left_alone(
    rehearsed: tuple[Path, list[str]],
) -> None:
    """The user's own model is still found, also by this process: it lies beside the settings."""
    assert "wrong" not in rehearsed[1][0]
    assert (rehearsed[0] / "active" / "report.html").is_file()
    run = Run(rehearsed[0], base_dir=rehearsed[0].parents[1] / "settings")
    assert list(run.model("passive").state_dict()) == ["0.weight", "0.bias"]


def test_a_finished_rehearsal_runs_again_and_none_counts_as_an_earlier_release(
    rehearsed: tuple[Path, list[str]],
) -> None:
    for party in ("active", "passive"):
        assert (rehearsed[0] / f"{party}.previous-1" / "summary.json").is_file()
    summary = json.loads((rehearsed[0] / "active" / "summary.json").read_text())
    assert "earlier_answers" not in summary


@pytest.mark.parametrize(
    ("text", "title", "settings"),
    [
        ("marvell", "marvell", {"name": "marvell"}),
        ("iso:noise_ratio=2", "iso noise_ratio=2", {"name": "iso", "noise_ratio": 2}),
        (
            "marvell:power_ratio=4,statistics=running",
            "marvell power_ratio=4 statistics=running",
            {"name": "marvell", "power_ratio": 4, "statistics": "running"},
        ),
        (
            "{name: gafm, composed_with: null, gan_only: true, hidden: [8, 4]}",
            "gafm composed_with=null gan_only=true hidden=[8, 4]",
            {"name": "gafm", "composed_with": None, "gan_only": True, "hidden": [8, 4]},
        ),
    ],
)
def test_a_defense_is_a_name_with_settings_or_yaml(
    text: str, title: str, settings: dict[str, object]
) -> None:
    assert parse_defense(text) == (title, settings)


@pytest.mark.parametrize("text", ["{name: marvell", "{strength: 4}", "marvell:power_ratio"])
def test_a_defense_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--"):
        parse_defense(text)


LONG = (
    "{{name: noisy_label, mechanism: {{kind: gaussian, noise_ratio: {ratio}}}, top_labels: 'true'}}"
)


def test_a_run_s_name_is_as_long_as_a_contract_allows_and_differs_where_settings_do() -> None:
    names = [parse_defense(LONG.format(ratio=one)).run_name("default_credit") for one in (2.8, 5.6)]
    assert names[0].startswith("default_credit-noisy_label-kind-gaussian-noise_ratio-2-")
    assert len(set(names)) == 2
    long = "e" * 60  # a name so long that no space is left
    names += [parse_defense(text).run_name(long) for text in ("none", "iso", "iso:noise_ratio=2")]
    assert len(set(names)) == 5
    name_of = TypeAdapter[str](Name)
    assert [name_of.validate_python(name) for name in names] == names
    cut_off_only_there = parse_defense("marvell:strength.power_ratio=4").run_name("breast_cancer")
    assert cut_off_only_there == "breast_cancer-marvell-power_ratio-4"


def test_overrides_reach_the_party_they_name_and_the_contract_both() -> None:
    with pytest.raises(SettingsError, match=r"expected active\.NAME=VALUE"):
        Overrides(["epochs=2"])
    routed = Overrides(["active.device=cpu", "passive.party=p", "contract.epochs=2"])
    assert routed.of("active") == ["device=cpu", "contract.epochs=2"]
    assert routed.of("passive") == ["party=p", "contract.epochs=2"]


def test_the_table_says_what_was_not_measured_and_rounds_bounds_up() -> None:
    counts = RunCounts(aligned_rows=9, steps=3)
    figures = ActiveFigures(
        model=ModelFigures(PredictionFigures(auc=0.9), alone=PredictionFigures(auc=0.7))
    )
    ledger = LeakBounds(honest_but_curious=Spread(max=0.9101))
    adjusted = {
        "informed": AdjustedFigures(0.95, 0.93, 0.97),
        "norm": AdjustedFigures(0.6, 0.3, 0.8),
    }
    summaries = {
        "one": Summary(
            counts=counts,
            active=replace(figures, ledger=ledger),
            leak=LeakFigures(beyond=BeyondFigures(adjusted, rows=9)),
        ),
        "two": Summary(counts=counts, active=figures),
    }
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(comparison_table("run", summaries))
    lines = [re.split(" {2,}", line.strip()) for line in console.export_text().splitlines()]
    assert lines[3:7] == [
        ["one", "0.9000", "informed", "≤ 0.911"],
        ["9 rows", "0.950 (0.930 to 0.970)", "honest-but-curious"],
        ["two", "0.9000", "not measured", "none"],
        ["9 rows"],
    ]
    peer = "an honest-but-curious peer"
    assert lines[8:] == [
        [f"one, informed: more than the 0.911 that the ledger states for {peer}"],
        ["test AUC without the feature owner's columns: 0.7000"],
    ]


def test_a_held_port_is_given_to_one_launcher_and_served_by_its_active_party() -> None:
    with ExitStack() as held:
        ports = [held.enter_context(held_port()) for _ in range(50)]
        assert len(set(ports)) == 50
        with socket.create_server(("127.0.0.1", ports[0])) as served:
            with socket.create_connection(("127.0.0.1", ports[0]), timeout=60):
                served.accept()[0].close()
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", ports[0]))
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        assert server.add_insecure_port(f"127.0.0.1:{ports[1]}") == ports[1]


def test_as_json_the_standard_output_stream_has_one_document_and_nothing_else(
    tmp_path: Path,
) -> None:
    short = ("--set", "contract.epochs=1", *SAME_SPLIT)
    words = ("splitveil", "demo", "breast_cancer", "-v", "--json", "--runs", str(tmp_path), *short)
    done = run_program(*PYTHON, *words, "--defense", "none", "iso:noise_ratio=2", stderr=PIPE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [run["title"] for run in found["runs"]] == ["none", "iso noise_ratio=2"]
    for run in found["runs"]:
        assert run["exit_code"] == 0
        assert Path(run["report"]).is_file()
        for party in ("active", "passive"):
            assert run["summaries"][party]["aligned_rows"] == 569
        written = json.loads((Path(run["folder"]) / "active" / "summary.json").read_text())
        assert run["summaries"]["active"]["test_auc"] == written["test_auc"]
    assert Path(found["comparison"]).is_file()
    assert "epoch 1/1" in done.stderr


def test_as_json_a_run_that_its_budget_ends_is_described_and_one_that_fails_is_not(
    tmp_path: Path,
) -> None:
    words = ("splitveil", "local", "deploy/examples/breast_cancer", "--json")
    runs = ("--runs", str(tmp_path), "--set", "contract.epochs=2", *SAME_SPLIT)
    ended = run_program(*PYTHON, *words, *runs, *BUDGET, stderr=PIPE)
    assert ended.returncode == 5, ended.stderr
    (run,) = json.loads(ended.stdout)["runs"]
    assert run["exit_code"] == 5
    assert run["summaries"]["active"]["aligned_rows"] == 569
    failed = run_program(*PYTHON, *words, *runs, "active.insecure_noise_seed=1", stderr=PIPE)
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert "did you mean 'active.defense.insecure_noise_seed'?" in failed.stderr
