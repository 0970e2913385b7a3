"""A model or a defense of the user's own that fails: one line, and an exit code that stays down."""

from pathlib import Path

import pytest
import torch

from splitveil.common.text.imports import may_pass
from tests.own_defenses import write_own_defenses
from tests.runs import write_example
from tests.system.processes import Party, PartyName, started

MODULE = """
import torch
from my_defenses import Clipped
from torch import nn


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, features):
        return self.net(features.numeric)


class Failing(nn.Module):
    def __init__(self, error="ValueError"):
        super().__init__()
        self.net, self.error = nn.Linear(5, 4), error

    def forward(self, features):
        if self.training and features.numeric.any():
            raise {"ValueError": ValueError, "memory": torch.OutOfMemoryError}[self.error](
                "CUDA out of memory"
            )
        return self.net(features.numeric)


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, activation, features):
        return self.net(activation).squeeze()


class FailingTop(Squeezed):
    def forward(self, activation, features):
        if activation.any():
            raise KeyError("secret")
        return self.net(activation).squeeze(1)


class FailingDefense(Clipped):
    def defend(self, batch):
        if len(batch.labels) > 8:
            raise ValueError("secret %s" % batch.labels.tolist())
        return super().defend(batch)
"""
NORMED = "bottom_model={kind: custom, module: 'my_models:Normed'}"
FAILING = "bottom_model={kind: custom, module: 'my_models:Failing', arguments: {error: %s}}"
TOP = "top_model={kind: custom, module: 'my_models:%s'}"
DEFENSE = "defense={name: custom, module: 'my_models:FailingDefense'}"
REMEDY = "; contract.drop_last: true leaves this last batch out"
REPEATED = "your own code fails: "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An example with 513 training rows in batches of 512."""
    write_example(tmp_path, rows=570)
    for party in ("active", "passive"):
        table = tmp_path / f"{party}.csv"
        header, *rows = table.read_text().splitlines()
        parts = ["test" if row.startswith("person-00285,") else "train" for row in rows]
        table.write_text(
            "\n".join(map(",".join, zip([header, *rows], ["part", *parts], strict=True))) + "\n"
        )
    write_own_defenses(tmp_path, "my_defenses")
    (tmp_path / "my_models.py").write_text(MODULE)
    return tmp_path


BATCHES = ("contract.batch_size=512", "contract.split={kind: column, column: part}")


@pytest.mark.parametrize(
    ("party", "setting", "exit_codes", "line"),
    [
        (
            "passive",
            NORMED,
            (4, 2),
            "bottom_model: Normed fails on a batch of 1 row in training: ValueError: Expected ",
        ),
        (
            "passive",
            FAILING % "ValueError",
            (4, 2),
            f"{REPEATED}ValueError: CUDA out of memory at my_models.py:23 (Failing.forward)",
        ),
        ("passive", FAILING % "memory", (4, 1), "OutOfMemoryError: CUDA out of memory"),
        (
            "active",
            TOP % "Squeezed",
            (2, 4),
            f"top_model: expected an output of shape (1,) for 1 row, got (){REMEDY}",
        ),
        (
            "active",
            TOP % "FailingTop",
            (2, 4),
            f"{REPEATED}KeyError (text not shown) at my_models.py:41 (FailingTop.forward)",
        ),
        (
            "active",
            DEFENSE,
            (2, 4),
            f"{REPEATED}ValueError (text not shown) at my_models.py:48 (FailingDefense.defend)",
        ),
    ],
)
def test_a_run_ends_with_one_line(
    folder: Path, party: PartyName, setting: str, exit_codes: tuple[int, int], line: str
) -> None:
    own = {party: [setting]}
    with started(
        folder, *BATCHES, active=own.get("active", []), passive=own.get("passive", [])
    ) as pair:
        assert pair.wait() == exit_codes, pair.outputs
    output = getattr(pair, party).output
    assert line in output
    assert (REMEDY in output) == (" for 1 row" in line or " of 1 row" in line)
    assert ("Traceback" in output) == (2 not in exit_codes)
    assert "secret" not in output


@pytest.mark.parametrize(
    ("party", "setting", "more", "line"),
    [
        ("passive", NORMED, (), "but a last batch of one row needs contract.drop_last: true"),
        ("passive", NORMED, ("contract.drop_last=true",), "the bottom model fits them;"),
        ("active", TOP % "Squeezed", (), "got ())"),
        ("active", TOP % "Squeezed", ("contract.batch_size=1",), "for 1 row, got ()"),
    ],
)
def test_check_says_what_a_last_batch_of_one_row_needs(
    folder: Path, party: PartyName, setting: str, more: tuple[str, ...], line: str
) -> None:
    checked = Party(party, folder, *BATCHES, setting, *more, command="check")
    assert checked.wait() == (2 if "contract.batch_size=1" in more else 0), checked.output
    assert line in checked.output


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(28, "No space left on device"), True),
        (RuntimeError("two devices, cuda:0 and cpu!"), False),
        (ValueError("CUDA"), False),
    ],
)
def test_only_what_a_restart_may_mend_passes(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
