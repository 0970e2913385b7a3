"""Runs all parties of a run in this process, and writes the files of separate processes.

    runs/<run name>/<party>/settings.yaml, metrics.jsonl, summary.json, checkpoint/
    runs/<run name>/<passive party>/exposure.json

It leaves out certificates, gRPC, checkpoints on the way, transcripts and private set intersection.
None of them changes a bit of the results, except for models with dropout, whose draws come from one
generator here.
"""

import io
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from splitveil.active_party.commands.run import train
from splitveil.active_party.grpc_server.server import Served
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder as TopBuilder
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.ristretto import DIGEST_BYTES, POINT_BYTES
from splitveil.common.errors import EndedForGood
from splitveil.common.models.device import torch_device
from splitveil.common.party import command_line
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.run_record import write_summary
from splitveil.common.run.contract import ACTIVE, AlignmentSettings
from splitveil.common.text.version import VERSION
from splitveil.library.in_process import InProcessPeer, meet
from splitveil.library.loading import PartiesSettings
from splitveil.passive_party.assembly import BottomBuilder, evaluation_labels
from splitveil.passive_party.commands.run import try_to_measure
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings


def run_recorded(
    settings: PartiesSettings, run_folder: Path, on_epoch: Callable[[], object] | None = None
) -> None:
    """Run all parties; leaves their settings, metrics, summaries and models.

    ``run_folder`` is the one that ``runs_dir`` and the contract's ``run_name`` name, where the
    active party keeps its noise key. EndedForGood after a budget: the figures are there.
    What ``on_epoch`` raises ends the run, as if the first passive party had failed.
    """
    own, folder = settings.active, _folder_with_settings(settings.active, run_folder / ACTIVE)
    with ExitStack() as resources:
        recorder = resources.enter_context(ActiveRecorder(own, folder))
        data = PartyData.of(own)
        builder = TopBuilder(own, data, torch_device(own.device))
        earlier = own.earlier_answers()
        passive = {
            name: _Passive(one, run_folder, resources) for name, one in settings.passive.items()
        }
        watched = next(iter(passive.values())).recorder
        watched.then = on_epoch

        def serve(session: ActiveSession) -> Served:
            stopped: EndedForGood | None = None
            runs = {name: party.run for name, party in passive.items()}
            try:
                meet(
                    session,
                    runs,
                    partial(InProcessPeer, session, clear_engine(own.contract.alignment)),
                )
            except EndedForGood as error:
                stopped = error  # as configured: it ends with a summary, like any other run
            except BaseException:
                if watched.raised is not None:  # not the error that the parties turned it into
                    raise watched.raised from None
                raise
            finally:
                for party in passive.values():
                    party.save_model()
            return {}, stopped, lambda: None

        _, stopped, _ = train(own, data, folder, builder, recorder, serve, earlier=earlier)
    write_summary(folder, replace(recorder.summary({}), version=VERSION))
    for party in passive.values():
        party.write_summary()
    if stopped is not None:
        raise stopped


class _Passive:
    def __init__(self, settings: PassiveSettings, run_folder: Path, resources: ExitStack) -> None:
        self._folder = _folder_with_settings(settings, run_folder / settings.folder_name())
        data = PartyData.of(settings)
        self._own_rows = len(data.ids)
        observer = _Recorder(settings, self._folder, data.ids, evaluation_labels(settings))
        # The active party's bar shows every step, in a notebook, too.
        observer.console = Console(file=io.StringIO(), force_jupyter=False)
        self.recorder = resources.enter_context(observer)
        self._builder = BottomBuilder(settings, data, torch_device(settings.device))
        me = Participant(settings.contract, settings.party, data.ids, data.table.splits)
        aligner = Aligner(
            me, clear_engine(settings.contract.alignment), partial(draw_nonce, settings)
        )
        self.run = PassiveRun(aligner, self._builder, self.recorder)

    def save_model(self) -> None:
        if self.run.trainer is not None:
            self._builder.save(self._folder, self.run.trainer.model, self.run.model_identity)

    def write_summary(self) -> None:
        """Write summary and exposure, after the recorder has been closed."""
        encoder, own_rows = self._builder.encoder, self._own_rows
        sample, sent = self.recorder.sample, self.recorder.sent_in_epochs()
        try_to_measure(self._folder, self.run.trainer, encoder, own_rows, sample, sent)
        found = self.recorder.summary(getattr(self.run.trainer, "feature_values", None))
        write_summary(self._folder, replace(found, version=VERSION))


class _Recorder(PassiveRecorder):
    then: Callable[[], object] | None = None
    """Called after each epoch."""
    raised: BaseException | None = None
    """The error that ``then`` raised."""

    def on_epoch(self, epoch: int) -> None:
        super().on_epoch(epoch)
        try:
            if self.then is not None:
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    self.then()  # dropout may draw from the same generator
        except BaseException as error:
            self.raised = error
            raise


def _folder_with_settings(settings: ActiveSettings | PassiveSettings, folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    command_line.save_resolved(settings, folder)
    return folder


class _ClearGroup:
    """Leaves digests of ids as they are: whoever sees them can look up any id."""

    def mask(self, digests: bytes, scalar: bytes) -> bytes:  # noqa: ARG002
        """Return the first bytes of each digest in the place of a point."""
        starts = range(0, len(digests), DIGEST_BYTES)
        return b"".join(digests[start : start + POINT_BYTES] for start in starts)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:  # noqa: ARG002
        return points


def clear_engine(settings: AlignmentSettings) -> EcdhEngine:
    """Build an engine that compares ids in the clear. Never use it between two processes.

    Multiplying every id by two secret scalars takes longer than training on a small table. What
    comes out, the set of common ids, does not depend on it, and neither does their order, which
    follows from the joint seed.
    """
    return EcdhEngine(
        min_aligned=settings.min_aligned, max_set_size=settings.max_set_size, group=_ClearGroup()
    )
