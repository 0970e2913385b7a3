"""Two-party split learning that measures what the label owner's gradients reveal, and bounds it.

    from splitveil import simulate

    runs = simulate("breast_cancer", defense=["none", "noisy_label"], seeds=5)
    runs.frame("defenses")
    runs.report()

Names are imported when they are first used, so that ``import splitveil`` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitveil.common.errors import (
    AlignmentError,
    DataError,
    SettingsError,
    SplitveilError,
    StorageError,
)
from splitveil.common.text.wording import VERSION

if TYPE_CHECKING:
    from splitveil.library.auditing import Audit, audit
    from splitveil.library.estimating import SplitClassifier
    from splitveil.library.example_ledger import Ledger
    from splitveil.library.loading import settings_schema
    from splitveil.library.planning import RunExposure, RunPlan, exposure_plan, plan
    from splitveil.library.predicting import predict
    from splitveil.library.runs import Run, Runs
    from splitveil.library.simulating import simulate

__all__ = [
    "AlignmentError",
    "Audit",
    "DataError",
    "Ledger",
    "Run",
    "RunExposure",
    "RunPlan",
    "Runs",
    "SettingsError",
    "SplitClassifier",
    "SplitveilError",
    "StorageError",
    "__version__",
    "attacks",
    "audit",
    "defenses",
    "exposure_plan",
    "models",
    "plan",
    "predict",
    "settings_schema",
    "simulate",
]

__version__ = VERSION

_HOMES = {
    "Audit": "auditing",
    "audit": "auditing",
    "Ledger": "example_ledger",
    "Run": "runs",
    "RunExposure": "planning",
    "RunPlan": "planning",
    "Runs": "runs",
    "exposure_plan": "planning",
    "plan": "planning",
    "predict": "predicting",
    "settings_schema": "loading",
    "SplitClassifier": "estimating",
    "simulate": "simulating",
}
"""Name -> its module in ``splitveil.library``."""


def __getattr__(name: str) -> Any:
    if name in {"attacks", "defenses", "models"}:
        return import_module(f"splitveil.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'splitveil' has no attribute {name!r}")
    return getattr(import_module(f"splitveil.library.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
