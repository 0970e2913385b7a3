"""A model or a defense of the user's own that fails: one line, and an exit code that stays down."""

from pathlib import Path

import pytest
import torch

from splitveil.common.text.imports import may_pass
from tests.support.defenses import write_own_defenses
from tests.support.processes import Party, PartyName, started
from tests.support.runs import write_example

MODULE = """
from my_defenses import Clipped
from torch import nn

class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, features):
        return super().forward(features.numeric)

class Failing(Normed):
    def forward(self, features):
        if features.numeric.any():
            raise ValueError("CUDA out of memory")
        return self[2](self[0](features.numeric))

class Top(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, activation, features):
        if activation.any():
            raise KeyError("secret")
        return super().forward(activation).squeeze()

class Defense(Clipped):
    def defend(self, batch):
        if len(batch.labels) > 8:
            raise ValueError("secret %s" % batch.labels.tolist())
        return super().defend(batch)
"""
BOTTOM = "bottom_model={kind: custom, module: 'my_models:%s'}"
NORMED = BOTTOM % "Normed"
TOP = "top_model={kind: custom, module: 'my_models:Top'}"
DEFENSE = "defense={name: custom, module: 'my_models:Defense'}"
BATCHES = ("contract.batch_size=512", "contract.split={kind: column, column: part}")
DROP = "contract.drop_last=true"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An example with 513 training rows in batches of 512."""
    write_example(tmp_path, rows=570)
    for table in (tmp_path / "active.csv", tmp_path / "passive.csv"):
        header, *rows = table.read_text().splitlines()
        lines = [f"{row},{'test' if '-00285,' in row else 'train'}" for row in rows]
        table.write_text("\n".join([f"{header},part", *lines, ""]))
    write_own_defenses(tmp_path, "my_defenses")
    (tmp_path / "my_models.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(
    ("party", "setting", "exit_codes", "says"),
    [
        ("passive", BOTTOM % "Failing", (4, 2), "ValueError: CUDA out of memory"),
        ("active", TOP, (2, 4), "KeyError (text not shown) at my_models.py:24 "),
        ("active", DEFENSE, (2, 4), "ValueError (text not shown) at my_models.py"),
    ],
)
def test_a_run_ends_with_one_line(
    folder: Path, party: PartyName, setting: str, exit_codes: tuple[int, int], says: str
) -> None:
    own = {party: (setting,)}
    with started(folder, *BATCHES, DROP, **own) as pair:  # type: ignore[arg-type]
        assert pair.wait() == exit_codes, pair.outputs
    output: str = getattr(pair, party).output
    assert f"your own code fails: {says}" in output, output
    assert "Traceback" not in output
    assert "secret" not in output


@pytest.mark.parametrize(
    ("party", "setting", "more", "exit_code", "says"),
    [
        ("passive", NORMED, BATCHES[0], 0, "but a last batch of one row needs contract.drop_last"),
        ("active", TOP, "contract.batch_size=1", 2, "for 1 row, got ()"),
    ],
)
def test_check_says_what_a_last_batch_of_one_row_needs(
    folder: Path, party: PartyName, setting: str, more: str, exit_code: int, says: str
) -> None:
    checked = Party(party, folder, *BATCHES, setting, more, command="check")
    assert checked.wait() == exit_code, checked.output
    assert says in checked.output


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(28, "No space left on device"), True),
        (RuntimeError("two devices, cuda:0 and cpu!"), False),
    ],
)
def test_a_restart_may_mend_memory_devices_and_files(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
