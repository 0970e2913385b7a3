"""Builds the active party's objects from its settings."""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitveil.active_party.defenses import (
    AnswerKeys,
    DefenseSettings,
    build_defense,
    open_noise_key,
)
from splitveil.active_party.defenses.example_keys import (
    GRADIENT_NOISE,
    example_keys,
    key_from_insecure_seed,
)
from splitveil.active_party.defenses.gafm import build_critic, persistent_shifts
from splitveil.active_party.defenses.label_noise import draw_noisy_labels
from splitveil.active_party.defenses.noise import SecureNoise, fresh_key
from splitveil.active_party.defenses.settings import GafmDefense, NoisyLabelDefense
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.run.session import ActiveSession, SessionObserver
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.early_stopping import EarlyStop
from splitveil.active_party.training.objectives import Adversarial, CrossEntropy, Objective
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import DataError
from splitveil.common.models.factory import build_top_model
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.run.course import AlignedRows
from splitveil.common.storage.run_store import RunStore


class TrainerBuilder:
    """Makes the trainer once the common rows are known, and keeps the encoder fitted on them.

    Raises:
        SettingsError: there is a noise key that cannot be used.
        StorageError: one is needed and cannot be written.
    """

    def __init__(self, settings: ActiveSettings, data: PartyData, device: torch.device) -> None:
        self.encoder: FeatureEncoder | None = None
        self._settings = settings
        self._data = data
        self._device = device
        self._num_classes = settings.data.num_classes
        self._earlier = open_earlier_model(settings)
        # Now rather than at the first step: a key that others can read ends a run before it begins.
        self._noise_key = open_noise_key(
            settings.defense,
            settings.contract.aggregate_dim,
            settings.noise_key_file(),
            self._num_classes,
        )

    def __call__(self, rows: AlignedRows) -> TopTrainer:
        """Build the trainer.

        Raises:
            DataError: a split has rows of one class only, or the training rows none of one of
                several.
        """
        settings, contract = self._settings, self._settings.contract
        if settings.early_stopping is not None and not len(rows.splits["validation"]):
            raise DataError(
                f"{self._data.table.source}: early_stopping needs validation rows, and none of the "
                f"aligned ones is"
            )
        labels = self._data.labels_at(rows.file_rows)
        self._check_classes(rows, labels)
        self.encoder, features = self._data.encode(rows, self._earlier)
        model = build_top_model(
            settings.top_model,
            contract.aggregate_shape,
            self.encoder,
            seed=settings.model_seed,
            num_classes=self._num_classes,
        )
        if self._earlier is not None:
            self._earlier.put_into(model)
        model.to(self._device)
        key, keys, noisy_labels = self._noise_key, None, None
        answer_keys = AnswerKeys()
        # Only where noise belongs to ids: many millions of texts are gigabytes.
        ids = [] if key is None else [self._data.ids[row] for row in rows.file_rows]
        noisy = _noisy_label_part(settings.defense)
        if key is not None and noisy is not None:
            noisy_labels = draw_noisy_labels(noisy.mechanism, labels, key, ids, self._num_classes)
        elif key is not None:
            keys = example_keys(key, ids, GRADIENT_NOISE)
        return TopTrainer(
            objective=self._build_objective(model, ids, rows.total_steps(contract), answer_keys),
            defense=build_defense(settings.defense, key, answer_keys, self._num_classes),
            features=features,
            labels=labels,
            device=self._device,
            example_keys=keys,
            noisy_labels=noisy_labels,
            answer_keys=answer_keys,
            data_digest=self._data.digest(self.encoder),
            num_classes=self._num_classes,
        )

    def _check_classes(self, rows: AlignedRows, labels: Tensor) -> None:
        source, names = self._data.table.source, self._settings.data.class_names
        for name, positions in rows.splits.items():
            counts = torch.bincount(labels[positions].long(), minlength=self._num_classes)
            if len(positions) and int((counts > 0).sum()) == 1:
                raise DataError(
                    f"{source}: the {len(positions)} aligned {name} rows hold only one class"
                )
            absent = [one for one, count in zip(names, counts.tolist(), strict=False) if not count]
            if absent and name == "train":
                raise DataError(
                    f"{source}: none of the {len(positions)} aligned training rows is of class "
                    f"{', '.join(map(repr, absent))}"
                )

    def _build_objective(
        self, model: nn.Module, ids: list[str], total_steps: int, answer_keys: AnswerKeys
    ) -> Objective:
        settings, defense = self._settings, self._settings.defense
        optimizer = build_optimizer(settings.optimizer, model)

        def schedule(step: int) -> float:
            return settings.contract.schedule.factor(step, total_steps)

        if not isinstance(defense, GafmDefense):
            learns_sent = not isinstance(defense, NoisyLabelDefense) or (
                defense.top_labels == "noisy"
            )
            return CrossEntropy(model, optimizer, schedule, learns_sent=learns_sent)
        shifts = None
        if defense.response == "persistent" and self._noise_key is not None:
            shifts = persistent_shifts(self._noise_key, ids, defense.response_width)
            shifts = shifts.to(self._device)
        critic = build_critic(
            defense.critic_width, defense.weight_limit, _critic_entropy(defense.insecure_noise_seed)
        )
        return Adversarial(
            defense,
            model,
            optimizer,
            schedule,
            critic=critic.to(self._device),
            noise=SecureNoise(answer_keys),
            shifts=shifts,
        )


def _noisy_label_part(defense: DefenseSettings) -> NoisyLabelDefense | None:
    inner = defense.composed_with if isinstance(defense, GafmDefense) else defense
    return inner if isinstance(inner, NoisyLabelDefense) else None


def _critic_entropy(seed: int | None) -> bytes:
    key = fresh_key() if seed is None else key_from_insecure_seed(seed)
    return hashlib.shake_256(b"critic" + key).digest(2496)


def build_session(
    settings: ActiveSettings,
    data: PartyData,
    build_trainer: Callable[[AlignedRows], TopTrainer],
    observer: SessionObserver,
    draw_nonce: Callable[[], bytes],
    store: RunStore | None = None,
    earlier: AccountBook | None = None,
) -> ActiveSession:
    """Build the session of one run."""
    stopping = settings.early_stopping
    return ActiveSession(
        settings.contract,
        data.ids,
        build_trainer,
        observer,
        draw_nonce,
        None if stopping is None else EarlyStop(stopping),
        math.inf if settings.run_budget is None else settings.run_budget.max_sum_kl,
        allow_audits=settings.allow_audits,
        store=store,
        noise_seed=getattr(settings.defense, "insecure_noise_seed", None),
        file_splits=data.table.splits,
        earlier=earlier,
    )
