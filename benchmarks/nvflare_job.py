"""Train two parties' columns with NVIDIA FLARE's recipes, in its simulator.

    python -m benchmarks.whole_run --init 20000 --nvflare PYTHON

PYTHON is an interpreter that has nvflare 2.9.0, openmined-psi 2.0.6, xgboost 3.2.0, tensorboard
and pandas, which are no dependencies of this project. Private set intersection (``DhPSIRecipe``)
comes first, then 100 rounds of vertical XGBoost (``XGBVerticalRecipe``) without its encryption,
which needs a plugin. Each round's AUC on the test rows is printed.

The simulator imports the parts by this module's name, so that it is not run as ``__main__``.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import xgboost as xgb
from nvflare.app_common.psi.psi_spec import PSI
from nvflare.app_common.psi.recipes.dh_psi import DhPSIRecipe
from nvflare.app_opt.xgboost.data_loader import XGBDataLoader
from nvflare.app_opt.xgboost.recipes import XGBVerticalRecipe
from nvflare.recipe import SimEnv, set_per_site_config

ROUNDS = 100
FILES = {"site-1": "own.csv", "site-2": "other.csv"}


class Items(PSI):  # type: ignore[misc]
    """The ids of a site."""

    def __init__(self, psi_writer_id: str, folder: str) -> None:
        super().__init__(psi_writer_id)
        self.psi_writer_id = psi_writer_id  # the recipe reads each argument's name
        self.folder = folder

    def load_items(self) -> list[str]:
        file = FILES[self.fl_ctx.get_identity_name()]
        return list(pd.read_csv(Path(self.folder) / file, usecols=["id"], dtype=str)["id"])


class Columns(XGBDataLoader):  # type: ignore[misc]
    """The common rows' columns of a site, and the labels at the first one."""

    def __init__(self, folder: str, common: str) -> None:
        self.folder = folder
        self.common = common

    def load_data(self) -> tuple[Any, Any]:
        table = pd.read_csv(Path(self.folder) / FILES[self.client_id], dtype={"id": str})
        table = table.set_index("id").loc[sorted(Path(self.common).read_text().split())]
        labels = table.pop("y") if self.rank == 0 else None
        is_test = table.pop("split") == "test"
        train, test = (
            xgb.DMatrix(
                table[rows], label=None if labels is None else labels[rows], data_split_mode=1
            )
            for rows in (~is_test, is_test)
        )
        return train, test


def main() -> None:
    folder = str(Path(sys.argv[1]).parent.resolve())
    with tempfile.TemporaryDirectory() as scratch:
        sites = SimEnv(clients=list(FILES), workspace_root=scratch)
        items = Items(psi_writer_id="psi_writer", folder=folder)
        DhPSIRecipe(name="psi", min_clients=2, local_psi=items).execute(sites)
        parameters = {
            "max_depth": 5,  # about the 31 leaves and the rate of scikit-learn's boosting
            "eta": 0.1,
            "objective": "binary:logistic",
            "eval_metric": "auc",
            "tree_method": "hist",
            "nthread": 1,
        }
        recipe = XGBVerticalRecipe(
            name="xgb",
            min_clients=2,
            num_rounds=ROUNDS,
            early_stopping_rounds=ROUNDS,
            label_owner="site-1",
            xgb_params=parameters,
        )
        loaders = {}
        for site in FILES:
            (common,) = Path(scratch).rglob(f"{site}/**/intersection.txt")
            loaders[site] = {"data_loader": Columns(folder, str(common))}
        set_per_site_config(recipe, loaders)
        recipe.execute(sites)
