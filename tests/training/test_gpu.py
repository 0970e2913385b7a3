"""Whole runs on a pretended GPU: no path mixes devices, and each has algorithms that repeat."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks.gpu import steps
from splitveil import predict, simulate
from splitveil.common.data.features import Features
from splitveil.common.errors import SettingsError
from splitveil.common.models import optimizers
from splitveil.common.models.device import restoring_devices, use_device
from splitveil.common.privacy import final_attacks
from splitveil.common.privacy.attacks import ATTACKS, RUN_ATTACKS, SideInformation
from tests.support.equality import assert_same
from tests.support.inference import write_wide_deep
from tests.support.peers import Lost, dying
from tests.support.runs import CPU, Parties, build_parties, run_in_process, write_example
from tests.support.tables import write_classes, write_numbers

EXTRAS = "with weights, bfloat16 and a model of own features"
TABLES: Mapping[str, Callable[[Path], None]] = {
    "two classes": lambda folder: write_example(folder, rows=300),
    "four classes": lambda folder: write_classes(folder, rows=300),
    "numbers": write_numbers,
    "three parties": lambda folder: write_numbers(folder, parties=3),
    "wide_deep": write_wide_deep,
    EXTRAS: write_example,
    "tabular": lambda folder: write_wide_deep(folder, kind="tabular"),
}
FLIPS = "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 2}}"
GAUSSIAN = "{name: noisy_label, mechanism: {kind: gaussian}}"
POSTERIOR = "{name: noisy_label, mechanism: {kind: gaussian, posterior: model}}"
ALIBI = "{name: noisy_label, mechanism: {kind: alibi, epsilon: 2}}"
OF_SEVERAL = f"""{{name: none}}
{{name: marvell}}
{{name: marvell, statistics: running}}
{FLIPS}
{POSTERIOR}
{ALIBI}"""
OF_TWO = f"""{OF_SEVERAL}
{{name: iso}}
{{name: iso, noise: persistent}}
{{name: max_norm}}
{{name: max_norm, noise: persistent}}
{{name: max_norm_positive}}
{{name: marvell, noise: persistent}}
{{name: marvell, strength: {{leak_auc: 0.6}}}}
{GAUSSIAN}
{{name: noisy_label, mechanism: {{kind: laplace, epsilon: 2}}}}
{{name: gafm}}
{{name: gafm, response: persistent, terms: gan_only}}
{{name: gafm, composed_with: {{name: marvell}}}}
{{name: gafm, composed_with: {FLIPS}}}"""
PATHS = [
    *(("two classes", defense) for defense in OF_TWO.splitlines()),
    *(("four classes", defense) for defense in OF_SEVERAL.splitlines()),
    *(("numbers", defense) for defense in ("{name: none}", GAUSSIAN)),
    ("three parties", GAUSSIAN),
    *((table, "{name: marvell}") for table in ("wide_deep", "tabular", EXTRAS)),
]
OF_LABEL_OWNER = [
    name
    for attacks in (ATTACKS, RUN_ATTACKS)
    for name, attack in attacks.items()
    if SideInformation.ACTIVATIONS not in attack.needs
]
OF_FEATURE_OWNER = [name for name in [*ATTACKS, *RUN_ATTACKS] if "informed" not in name]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    for name, write in TABLES.items():
        write(folder / name)
    return folder


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("table", "defense"), PATHS)
def test_training_and_predicting(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, defense: str
) -> None:
    """A defense computes the same with audits and without; they run once for each kind of label."""
    monkeypatch.setattr(final_attacks, "_STEPS", 3)  # each of them is the same for a device
    settings: dict[str, Any] = {"contract.epochs": 1, "active.insecure_nonce_seed": 1}
    for party in ("active", "passive"):
        settings |= {f"{party}.device": "cuda:0", f"{party}.torch_threads": 1}
    audited: list[str] | None = [] if defense != "{name: none}" else None
    if audited is not None:
        settings["active.refit"] = None
    elif "classes" in table:
        settings["active.leak_monitor.attacks"] = OF_LABEL_OWNER
        settings["passive.adversary.attacks"] = OF_FEATURE_OWNER
    if table == EXTRAS:
        settings |= {
            "active.data.class_weights": [1, 3],
            "active.serving.fallback": True,
            "active.autocast": "bfloat16",
        }
    chosen = yaml.safe_load(defense)
    given: dict[str, Any] = {"defense": chosen, "settings": settings, "attacks": audited}
    (run,) = simulate(tables / table, **given, runs=tmp_path)
    found = predict(run)
    numbers = found.drop(columns=["id", "canonical_id", "found"]).dropna()
    assert len(numbers) > 100
    assert np.isfinite(numbers.to_numpy()).all()


DROPOUT = "bottom_model={kind: mlp, hidden: [8], dropout: 0.5}"
SPARSE = "optimizer={kind: adam}"


@pytest.mark.parametrize(("defense", "most"), [("marvell", 6), ("noisy_label", 3), ("gafm", 8)])
def test_the_host_waits_for_a_gpu_a_few_times_a_step(
    gpu: torch.device, defense: str, most: int
) -> None:
    """As the benchmark counts it. Waits for each column, or each row, are many."""
    assert float(steps(gpu, 64, defense).found.split()[0]) <= most


@pytest.mark.parametrize("per_batch", [False, True])
def test_features_move_to_a_gpu_once(
    gpu: torch.device, tables: Path, per_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is moved with each batch is found by the same count."""
    moved, to, rows = list[Any](), Features.to, Features.rows

    def noted(own: Features, device: torch.device) -> Features:
        moved.extend(one for one in own.parts() if one.device != device == gpu)
        return to(own, device)

    monkeypatch.setattr(Features, "to", noted)
    if per_batch:

        def by_batch(own: Features, at: Any) -> Features:
            if isinstance(at, slice):  # of arrays, while they are encoded
                return rows(own, at)
            return rows(own.to(CPU), at.cpu()).to(at.device)

        monkeypatch.setattr(Features, "rows", by_batch)
    run_in_process(build_parties(tables / "two classes", device=gpu))
    assert (len(moved) == 2) != per_batch  # one table of each party


KILLED = [
    ("two classes", "{name: marvell}", DROPOUT),
    ("two classes", "{name: iso, noise: persistent}", ""),
    ("two classes", "{name: gafm}", ""),
    ("two classes", GAUSSIAN, ""),
    ("four classes", POSTERIOR, ""),
    ("four classes", "{name: marvell, statistics: running}", ""),
    ("tabular", "{name: marvell}", "optimizer={kind: adamw, weight_decay: 0.01, clip_norm: 0.5}"),
    ("numbers", GAUSSIAN, ""),
    ("wide_deep", "{name: max_norm}", SPARSE),
]


@pytest.fixture
def repeatable(gpu: torch.device) -> Iterator[torch.device]:
    with restoring_devices():
        yield use_device(str(gpu))


@pytest.mark.parametrize(("table", "defense", "more"), KILLED)
def test_a_killed_run_resumes_with_equal_bits(
    tables: Path,
    tmp_path: Path,
    repeatable: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    defense: str,
    more: str,
) -> None:
    if more == SPARSE:
        monkeypatch.setattr(optimizers, "SPARSE_FROM_ROWS", 4)
    both = ["contract.checkpoint_steps=2", "contract.epochs=2"]
    active = [*both, f"defense={defense[:-1]}, insecure_noise_seed: 7}}", "insecure_nonce_seed=1"]
    passive = [*both, "insecure_nonce_seed=2", *([more] if more else [])]

    def built(runs: Path) -> Parties:
        torch.manual_seed(0)
        return build_parties(tables / table, active, passive, runs=runs, device=repeatable)

    whole = built(tmp_path / "whole")
    run_in_process(whole)
    first = built(tmp_path / "killed")
    with pytest.raises(Lost):
        run_in_process(first, dying(5, after=True))
    second = built(tmp_path / "killed")
    second.session.reopen()
    run_in_process(second)
    assert second.active.resumed != []
    assert_same(second, whole)


def test_a_run_of_one_gpu_is_not_resumed_on_another(
    tables: Path, tmp_path: Path, repeatable: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither party contacts the other: each says so when it takes up its own state."""
    both = ["contract.checkpoint_steps=2"]

    def built(device: torch.device = repeatable) -> Parties:
        return build_parties(tables / "two classes", both, both, runs=tmp_path, device=device)

    with pytest.raises(Lost):
        run_in_process(built(), dying(5, after=True))
    then = torch.cuda.get_device_name(repeatable)
    for device, now in ((CPU, "a CPU"), (repeatable, "NVIDIA T4")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA T4")
        parties = built(device)
        for take_up in (parties.session.reopen, parties.run.reopen):
            with pytest.raises(
                SettingsError, match=f"was computed on {then}, and would go on with {now}.*--fresh"
            ):
                take_up()
