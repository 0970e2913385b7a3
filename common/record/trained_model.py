"""Opens the model that a run has left, for predictions, and knows which run that was.

The identity stands in the metadata of the weights: the run's id, the number of batches that the
weights have seen, and the digest of the contract. Both halves of a model have to agree in it.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import SettingsError
from splitveil.common.record.initial_weights import EarlierModel
from splitveil.common.record.model_files import WEIGHTS
from splitveil.common.run.contract import Contract, first_difference
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.settings import validate
from splitveil.common.text.yaml_text import RESOLVED, read_yaml_file

_RUN, _BATCHES, _CONTRACT = "run_id", "batch_number", "contract"


def identity_metadata(model: ModelIdentity, contract: Contract) -> dict[str, str]:
    """Return the metadata by which a half of a model is known again."""
    return {
        _RUN: model.run_id,
        _BATCHES: str(model.batch_number),
        _CONTRACT: contract.digest().hex(),
    }


@dataclass(frozen=True)
class TrainedModel:
    """One party's half of a trained model, in the ``checkpoint`` folder of the run."""

    identity: ModelIdentity
    saved: EarlierModel

    @classmethod
    def open(cls, folder: Path, contract: Contract, weights: str = WEIGHTS) -> "TrainedModel":
        """Open a party's folder of a run. The weights are loaded when they are needed.

        Raises:
            SettingsError: there is no readable model, it does not say which run it is from, or it
                was trained under another contract.
        """
        saved = EarlierModel.open(folder / "checkpoint", weights, "model")
        path = saved.folder / weights
        run_id, batches = saved.metadata.get(_RUN, ""), saved.metadata.get(_BATCHES, "")
        if not run_id or not batches.isdecimal():
            raise SettingsError(
                f"model: {path} does not say which run it is from; train again to predict with it"
            )
        trained_under = saved.metadata.get(_CONTRACT, "")
        if trained_under != contract.digest().hex():
            raise SettingsError(
                f"model: {path} was trained under another contract than that of these settings"
                f"{_difference(folder, trained_under, contract)}"
            )
        return cls(ModelIdentity(run_id, int(batches)), saved)

    @property
    def encoder(self) -> FeatureEncoder | None:
        """The encoding of the party's features; None if it had none."""
        return self.saved.encoder

    def put_into(self, model: nn.Module) -> None:
        """Load the weights into a model, and put it into evaluation mode.

        Raises:
            SettingsError: they do not fit the model of these settings.
        """
        self.saved.put_into(model)
        model.eval()


def _difference(folder: Path, trained_under: str, contract: Contract) -> str:
    """Return the end of a sentence, which the settings in the run's folder give if they can."""
    with suppress(SettingsError, TypeError, KeyError):
        stored = read_yaml_file(folder / "settings.yaml", RESOLVED)["contract"]
        trained = validate(Contract, stored, "contract")
        if trained.digest().hex() == trained_under:
            then = trained.canonical_json()
            return f": {first_difference(contract, then, 'the time of training')}"
    return ""
