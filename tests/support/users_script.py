# pyright: strict
"""What a user writes with the public names, all in ordinary ways: type checkers find no fault."""

from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from splitveil import Ledger, Run, Runs, audit, defenses, models, plan, predict, simulate


def bottom(shapes: models.FeatureShapes) -> nn.Module:
    return nn.Sequential(nn.Linear(shapes.numeric_dim, 16), nn.ReLU())


def noisy(gradients: Tensor, labels: Tensor, noise: defenses.NoiseSource) -> Tensor:
    return gradients + noise.standard_normal(tuple(gradients.shape), gradients)


def show(run: Run) -> None:
    print(run.name, run.rows("epochs")[-1])


def main(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    active = pl.DataFrame({"id": range(200), "churned": x[:, 0] > 0, "age": x[:, 1]})
    passive = pl.DataFrame({"id": range(200), "calls": x[:, 2]})
    runs: Runs = simulate(
        active=active,
        passive=passive,
        label="churned",
        key="id",
        defense=["none", "iso:noise_ratio=2", defenses.Marvell(power_ratio=4), noisy],
        attacks=["norm", "spectral"],
        settings={"contract.epochs": 1, "passive.bottom_model": bottom},
        threads=1,
        runs=folder,
        callbacks=[show],
    )
    run, frame = runs[0], runs.frame("defenses")
    print(frame.shape, frame.columns, runs.bounds["none"]["anybody"], run.test_auc, runs.report())
    activation = run.model("passive")(run.features("passive", [1, 2]))
    logits: Tensor = run.model("active")(activation, run.features("active", [1, 2]))
    print(logits.sigmoid(), predict(run, [1, 2, 500]), run.export(folder / "halves", "onnx"))
    ledger = Ledger(200)
    answer = defenses.Iso(noise_ratio=2)(activation.detach(), torch.tensor([0, 1]))
    ledger.charge(answer.charge, [1, 2])
    ledger.charge(0.05, np.arange(64), adversary="anybody")
    print(answer.gradient.shape, ledger.guarantee().guarantee.max, ledger.frame())
    found = audit(x, (x[:, 0] > 0).astype(int), batches=10, covariates=x[:, 1:])
    print(found.strongest, found.frame("batches"), plan("breast_cancer", defense="marvell").frame())


if __name__ == "__main__":
    main(Path("runs"))
