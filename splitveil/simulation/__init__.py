"""Both parties of a run in one process, for experiments, tests and measurements.

    from pathlib import Path
    from splitveil import simulation

    settings = simulation.read_settings(Path("deploy/examples/breast_cancer"))
    run = simulation.build(settings)
    run.meet()
    print(run.active.seen.evaluations[-1].auc, run.active.session.leak_bounds())

Sessions, sample order, defenses and tensors are the ones that two processes use: with the same
seeds, a run in one process ends with the same bits. Only a model with dropout is different, whose
draws then come from one generator instead of one for each party.

``meet`` needs no network; ``meet_over_grpc`` sends every message through gRPC on loopback. With a
folder for checkpoints, a run can be resumed by building it again.
"""

from splitveil.simulation.clear_ids import clear_engine
from splitveil.simulation.in_process import InProcessPeer
from splitveil.simulation.loopback import free_address, meet_over_grpc, serving
from splitveil.simulation.parties import (
    ActiveParty,
    Connect,
    PartiesSettings,
    PassiveParty,
    Simulation,
    assemble_active,
    assemble_passive,
    build,
    build_active,
    build_passive,
    connect_in_process,
    read_settings,
)
from splitveil.simulation.recordings import ActiveRecording, PassiveRecording, Recording

__all__ = [
    "ActiveParty",
    "ActiveRecording",
    "Connect",
    "InProcessPeer",
    "PartiesSettings",
    "PassiveParty",
    "PassiveRecording",
    "Recording",
    "Simulation",
    "assemble_active",
    "assemble_passive",
    "build",
    "build_active",
    "build_passive",
    "clear_engine",
    "connect_in_process",
    "free_address",
    "meet_over_grpc",
    "read_settings",
    "serving",
]
