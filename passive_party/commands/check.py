"""``splitveil check passive.yaml``: checks settings, data, model and connection only."""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from splitveil.common.alignment.buckets import padded_size
from splitveil.common.errors import PeerUnreachable, SettingsError
from splitveil.common.models.device import device_in_words
from splitveil.common.models.factory import Trial, build_bottom_model, lone_row_in_words
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.settings import bins_of
from splitveil.common.party import command_line
from splitveil.common.party.command_line import Check
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.endpoint import status_checks
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.privacy.custom_attacks import try_custom_attacks
from splitveil.common.record.model_files import PretrainedWeights
from splitveil.common.wire.endpoint import check_security
from splitveil.passive_party.assembly import evaluation_labels
from splitveil.passive_party.connecting import connection_of, idle_peer
from splitveil.passive_party.exposure_plan import check_exposure
from splitveil.passive_party.probing import connection_checks
from splitveil.passive_party.settings import PassiveSettings


def check(parsed: argparse.Namespace) -> None:
    settings: PassiveSettings = parsed.loaded
    is_one_sided = settings.contract.is_one_sided
    if is_one_sided and parsed.connect:
        raise SettingsError(
            "--connect: with alignment.kind one_sided the active party calls this one: start "
            "splitveil serve passive.yaml, and have the active party check --connect"
        )

    def connection() -> str:
        credentials = credential_files(settings, settings.party)
        if is_one_sided:
            at = settings.answers.listen
            security = check_security(credentials, at, "answers.listen")
            return f"answers.listen: {at}, where serve offers the sealed table; {security}"
        security = check_security(credentials, settings.connect, "connect")
        state = "probed below" if parsed.connect else _peer_state(settings)
        return f"connect: {state}; security: {security}"

    def data_and_model() -> str:
        data = PartyData.of(settings)
        check_exposure(settings, data)
        earlier = open_earlier_model(settings)
        encoder = data.fit(np.arange(len(data.ids)), earlier, bins_of(settings.bottom_model))
        if encoder is None:
            raise SettingsError("data.features: the passive party needs features")
        contract, device = settings.contract, command_line.device_of(settings)
        padded_size(len(data.ids), contract.alignment.buckets, contract.alignment.max_set_size)
        build = partial(
            build_bottom_model,
            settings.bottom_model,
            encoder,
            contract.cut_shape,
            seed=settings.model_seed,
        )
        model = build(trial=Trial((contract.batch_size,), device))
        build_optimizer(settings.optimizer, model)  # has the model what rates names?
        but = "" if contract.drop_last else lone_row_in_words(build, device)
        PretrainedWeights.open(settings.bottom_model, settings.base_dir).put_into(model)
        if earlier is not None:
            earlier.put_into(model)
        fits = f"the bottom model fits them{but}"
        return f"data: {data.summary(contract)}; {fits}; {data.table.id_report.in_words()}"

    def labels() -> str:
        found = evaluation_labels(settings)
        return f"evaluation labels: {'none' if found is None else found.table.source}"

    details, adversary = [*status_checks(settings.status), labels], settings.adversary
    if adversary is not None and adversary.custom_attacks:
        shape = settings.contract.cut_shape
        details.append(
            lambda: (
                f"attacks: {', '.join(try_custom_attacks(adversary, shape))} can score gradients"
            )
        )
    parts: list[Iterable[Check]] = [
        [
            connection,
            lambda: f"device: {device_in_words(command_line.device_of(settings))}",
            data_and_model,
        ]
    ]
    is_ready = parsed.connect or is_one_sided
    then = "run {}" if is_ready else "check {} --connect, while the active party does"
    if parsed.connect:
        parts = [*parts, _probes(settings, parsed.wait)]
    command_line.report_check(
        settings, parsed, parts, details, f"splitveil {then.format(parsed.settings)}"
    )


def _probes(settings: PassiveSettings, wait_s: float) -> Iterator[Check]:
    link = connection_of(settings, credential_files(settings, settings.party))
    yield from connection_checks(settings, link, wait_s)


def _peer_state(settings: PassiveSettings) -> str:
    with idle_peer(settings) as peer:
        where = peer.connection.where
        try:
            ready = peer.is_ready()
        except PeerUnreachable:
            return f"no active party answers at {where} now; a run would wait for it"
    return f"the active party at {where} is {'ready' if ready else 'not ready'}"
