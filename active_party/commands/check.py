"""``splitveil check active.yaml``: tries everything a run depends on, and changes nothing."""

import argparse
import socket
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from splitveil.active_party.assembly import peers_of
from splitveil.active_party.defenses.example_keys import used_labels_file
from splitveil.active_party.earlier_runs import answers_before
from splitveil.active_party.grpc_server.probe_server import probe_checks
from splitveil.active_party.planned import plan_of
from splitveil.active_party.predict.embed_client import TableClient
from splitveil.active_party.predict.predictor import open_clients
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import groups_of
from splitveil.common.alignment.buckets import padded_size
from splitveil.common.data.kinds import open_source
from splitveil.common.data.label_columns import count_others
from splitveil.common.errors import SettingsError
from splitveil.common.models.device import device_in_words
from splitveil.common.models.factory import Trial, build_top_model, lone_row_in_words
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.settings import bins_of
from splitveil.common.party import command_line
from splitveil.common.party.command_line import Check
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.endpoint import check_free, status_checks
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.privacy.custom_attacks import try_custom_attacks
from splitveil.common.run.contract import ACTIVE
from splitveil.common.wire.endpoint import check_security


def check(parsed: argparse.Namespace) -> None:
    settings: ActiveSettings = parsed.loaded

    monitor, listen = settings.leak_monitor, (settings.listen, "listen")
    checks: list[Check] = [
        lambda: f"security: {check_security(credential_files(settings, ACTIVE), *listen)}",
        partial(_address, settings, calls=parsed.connect),
        lambda: f"device: {device_in_words(command_line.device_of(settings))}",
        partial(_defense, settings),
    ]
    details: list[Check] = [
        *status_checks(settings.status),
        partial(_noise_key, settings),
        lambda: f"earlier ledgers: {len(answers_before(settings)):,} examples",
    ]
    if monitor is not None and monitor.custom_attacks:
        shape = settings.contract.aggregate_shape
        details.append(
            lambda: f"attacks: {', '.join(try_custom_attacks(monitor, shape))} can score gradients"
        )
    parts: list[Iterable[Check]] = [checks, _data_and_bounds(settings)]
    if parsed.connect and not settings.contract.is_one_sided:
        parts.append(probe_checks(settings, parsed.wait))
    then = "run" if parsed.connect else "plan"
    command_line.report_check(
        settings, parsed, parts, details, f"splitveil {then} {parsed.settings}"
    )


def _noise_key(settings: ActiveSettings) -> str:
    # A key in the run's own folder is drawn by the run itself.
    path = settings.noise_key_file()
    is_there = path.exists() or used_labels_file(path).exists()
    if settings.noise_key_path is not None and is_there:
        settings.defense.open_noise_key(settings.defense_context(), path)
    return f"noise key: {settings.noise_key_path or 'a fresh one for each run, if needed'}"


def _defense(settings: ActiveSettings) -> str:
    peers_of(settings)
    settings.defense.require_usable(settings.defense_context())
    return f"defense: {settings.defense.name}"


def _data_and_bounds(settings: ActiveSettings) -> Iterator[Check]:
    data = PartyData.of(settings)
    yield partial(_data_and_model, settings, data)
    planned = plan_of(settings, data, earlier=answers_before(settings))
    yield lambda: f"labels: {planned.data.shares}"
    yield planned.bounds_in_short
    if planned.persons:
        yield lambda: planned.persons


def _data_and_model(settings: ActiveSettings, data: PartyData) -> str:
    earlier = open_earlier_model(settings)
    encoder = data.fit(np.arange(len(data.ids)), earlier, bins_of(settings.top_model))
    contract, device = settings.contract, command_line.device_of(settings)
    padded_size(len(data.ids), contract.alignment.buckets, contract.alignment.max_set_size)
    build = partial(
        build_top_model,
        settings.top_model,
        contract.aggregate_shape,
        encoder,
        seed=settings.model_seed,
        num_classes=settings.data.num_classes,
    )
    model = build(trial=Trial((contract.batch_size,), device))
    build_optimizer(settings.optimizer, model)  # has the model what rates names?
    but = "" if contract.drop_last else lone_row_in_words(build, device)
    if earlier is not None:
        earlier.put_into(model)
    groups_of(settings, data)
    others = count_others(settings.data, open_source(settings.data.source, settings.base_dir))
    fits = f"the top model fits them{but}{others}"
    return f"data: {data.summary(contract)}; {fits}; {data.table.id_report.in_words()}"


def check_files_and_address(settings: ActiveSettings) -> None:
    """Check what would end a run, before its folder is opened and earlier results move aside."""
    _address(settings)
    check_free(settings.status)
    _noise_key(settings)
    open_earlier_model(settings)
    try_custom_attacks(settings.leak_monitor, settings.contract.aggregate_shape)


def _address(settings: ActiveSettings, *, calls: bool = False) -> str:
    """Check where a run would serve, or from where it would take the sealed table."""
    if settings.contract.is_one_sided:
        (client,) = open_clients(settings, TableClient, None)
        with client:
            served = f"of run {client.check_model().model.run_id} " if calls else ""
        where = client.connection.where
        return f"inference.connect: the sealed table {served}is taken from {where}"
    host, _, port = settings.listen.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(f"listen: cannot serve at {settings.listen}: {error}") from error
    return f"listen: {settings.listen} is free"
