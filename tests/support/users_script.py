# pyright: strict
"""What a user writes with the public names, all in ordinary ways: type checkers find no fault."""

from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from splitveil import Ledger, Run, Runs, attacks, audit, defenses, models, plan, predict, simulate


class Bottom(nn.Module):
    def __init__(self, shapes: models.FeatureShapes) -> None:
        super().__init__()
        self.plan = nn.Embedding(shapes.vocabulary_sizes[0], 4)
        self.dense = nn.Linear(shapes.numeric_dim + 4, 16)

    def forward(self, numbers: Tensor, categorical: Tensor) -> Tensor:
        activation: Tensor = self.dense(torch.cat([numbers, self.plan(categorical[:, 0])], 1))
        return activation


class Halved(defenses.Defense):
    def __init__(self, context: defenses.DefenseContext, noise: defenses.NoiseSource) -> None:
        self._noise = noise

    def defend(self, batch: defenses.RawBatch) -> defenses.Defended:
        sent = defenses.release(batch.gradients / 2, batch.gradients)
        return defenses.Defended(sent, defenses.DefenseReport(noise_power=0.0))


def noisy(
    gradients: Tensor, labels: Tensor, noise: defenses.NoiseSource, ratio: float = 1.0
) -> Tensor:
    return gradients + ratio * noise.standard_normal(tuple(gradients.shape), gradients)


def largest(gradients: Tensor) -> Tensor:
    return gradients.abs().amax(dim=1)


def show(run: Run) -> None:
    print(run.name, run.rows("epochs")[-1])


def main(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    active = pl.DataFrame({"id": range(200), "churned": x[:, 0] > 0, "age": x[:, 1]})
    plans = np.where(x[:, 0] > 1, "M", "S")
    passive = pl.DataFrame({"id": range(200), "calls": x[:, 2], "plan": plans})
    runs: Runs = simulate(
        active=active,
        passive=passive,
        label="churned",
        key="id",
        defense=["none", defenses.Iso(noise_ratio=1.0), Halved, defenses.own(noisy)],
        attacks=["norm", attacks.own(largest, name="largest")],
        settings={"contract.epochs": 1, "passive.bottom_model": Bottom},
        threads=1,
        runs=folder,
        callbacks=[show],
    )
    run, frame = runs[0], runs.frame("defenses")
    print(frame.shape, frame.columns, runs.bounds["none"]["anybody"], run.test_auc, runs.report())
    bottom, top = run.model("passive"), run.model("active")
    logits: Tensor = top(bottom(run.features("passive", [1, 2])), run.features("active", [1, 2]))
    print(logits.sigmoid(), predict(run, [1, 2, 500]), run.export(folder / "halves", "onnx"))
    ledger = Ledger(200)
    ledger.charge(0.05, np.arange(64), adversary="anybody")
    print(ledger.guarantee().guarantee.max, ledger.frame())
    found = audit(x, (x[:, 0] > 0).astype(int), batches=10, covariates=x[:, 1:])
    print(found.strongest, found.frame("batches"), plan("breast_cancer", defense="marvell").frame())


if __name__ == "__main__":
    main(Path("runs"))
