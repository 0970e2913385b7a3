"""Runs all parties of a run in this process, and leaves the files that their own processes leave.

    runs/<run name>/<party>/settings.yaml, metrics.jsonl, summary.json, checkpoint/

What processes do beyond that are certificates, gRPC, checkpoints on the way, transcripts and
private set intersection. None of it changes a bit of what is learned, except for models with
dropout, whose draws come from one generator here.
"""

import io
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.results import save_alone, save_results
from splitveil.common.errors import EndedForGood
from splitveil.common.party import command_line
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.model_files import identity_metadata, save_model
from splitveil.common.record.run_record import write_summary
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.version import VERSION
from splitveil.passive_party.assembly import BottomBuilder
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from splitveil.simulation.clear_ids import clear_engine
from splitveil.simulation.parties import (
    ActiveParty,
    PartiesSettings,
    PassiveParty,
    Simulation,
    assemble_active,
    assemble_passive,
)
from splitveil.simulation.recordings import ActiveRecording, PassiveRecording


class _Passive:
    """A passive party with its recorder and its files."""

    def __init__(self, settings: PassiveSettings, folder: Path, resources: ExitStack) -> None:
        self.settings = settings
        self._folder = folder
        data = PartyData.of(settings)
        observer = PassiveRecorder(settings, folder, data.ids, _evaluation_labels(settings))
        observer.console = Console(file=io.StringIO())  # the active party's bar shows every step
        self._recorder = resources.enter_context(observer)
        engine = clear_engine(settings.contract.alignment)
        self.run: PassiveRun
        self._builder: BottomBuilder
        self.run, self._builder = assemble_passive(settings, data, self._recorder, engine)
        if settings.audits:
            self.run.auditor = self._recorder

    def save_model(self) -> None:
        if self.run.trainer is not None:
            identity = identity_metadata(self.run.model_identity, self.settings.contract)
            save_model(self._folder, self.run.trainer.model, self._builder.encoder, identity)

    def write_summary(self) -> None:
        """Write the summary, after the recorder has been closed."""
        write_summary(self._folder, replace(self._recorder.summary(), version=VERSION))


def run_recorded(settings: PartiesSettings, run_folder: Path) -> None:
    """Run all parties; leaves their settings, metrics, summaries and models.

    Args:
        settings: of all parties. Their ``runs_dir`` and the contract's ``run_name`` name the
            folder, too: that is where the active party keeps its noise key.
        run_folder: the run's folder, in which each party gets its own.

    Raises:
        EndedForGood: a budget or a gate ended the run; its figures are in the folder.
        SplitveilError: the run failed.
    """
    folders = {name: run_folder / one.folder_name() for name, one in settings.passive.items()}
    active_folder = run_folder / ACTIVE
    for folder in (active_folder, *folders.values()):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    command_line.save_resolved(settings.active, active_folder)
    stopped: EndedForGood | None = None
    with ExitStack() as resources:
        recorder = resources.enter_context(ActiveRecorder(settings.active, active_folder))
        session, top = assemble_active(settings.active, recorder)
        passive = {}
        for name, one in settings.passive.items():
            command_line.save_resolved(one, folders[name])
            passive[name] = _Passive(one, folders[name], resources)
        engine = clear_engine(settings.active.contract.alignment)
        # The recorders observe the run; these recordings stay empty.
        parties = Simulation(
            ActiveParty(settings.active, session, engine, ActiveRecording()),
            {
                name: PassiveParty(one.settings, one.run, PassiveRecording())
                for name, one in passive.items()
            },
        )
        try:
            parties.meet()
        except EndedForGood as error:
            stopped = error  # as configured: it ends with a summary, like any other run
        finally:
            recorder.note_refit(save_results(settings.active, active_folder, session, top))
            recorder.note_alone(save_alone(settings.active, active_folder, session, top))
            for party in passive.values():
                party.save_model()
    stopped = stopped or recorder.objection()
    write_summary(active_folder, replace(recorder.summary({}), version=VERSION))
    for party in passive.values():
        party.write_summary()
    if stopped is not None:
        raise stopped


def _evaluation_labels(settings: PassiveSettings) -> PartyData | None:
    if settings.adversary is None or settings.adversary.labels is None:
        return None
    return PartyData.load(
        settings.adversary.labels, settings.base_dir, id_rules=settings.contract.ids
    )
