"""What the ranks of a party send each other when they compute on a GPU, which is pretended."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from splitveil.common.models.data_parallel import Beginning, Learner, begin, work
from splitveil.common.models.ranks import Ranks
from tests.models.test_data_parallel import (
    BATCHES,
    FACTS,
    OWN,
    ROWS,
    features,
    learner_of,
    normalised,
    sparse,
    stepped,
)
from tests.support import pretended_cuda
from tests.support.forked import server

CUDA = pretended_cuda.CUDA


@contextmanager
def noting(notes: list[tuple[str, str]]) -> Iterator[None]:
    """Pretend that there is a GPU, with gloo in the place of NCCL; note what is sent from where."""
    compute, init = pretended_cuda._compute, dist.init_process_group

    def noted(func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            notes.extend((func.overloadpacket.__name__, one.device.type) for one in tensors)
        return compute(func, args, kwargs)

    def with_gloo(backend: str, **given: Any) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        init("gloo", **given)

    with pytest.MonkeyPatch.context() as patch, pretended_cuda.pretended_cuda():
        patch.setattr(pretended_cuda, "_compute", noted)
        patch.setattr(dist, "init_process_group", with_gloo)
        yield


def second_rank(file: Path, build: Any) -> None:
    torch.set_num_threads(1)
    notes: list[tuple[str, str]] = []
    with noting(notes):
        ranks = Ranks(1, 2, CUDA, file=file)
        ranks.compare(FACTS)
        work(ranks, partial(learner_of, build, ranks, device=CUDA))
        ranks.close()
    file.with_suffix(".json").write_text(json.dumps(notes))


@pytest.mark.parametrize("build", [normalised, sparse])
def test_both_ends_of_a_transfer_are_on_one_device_and_nccl_begins_with_all_ranks(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    file, notes = tmp_path / "ranks", list[tuple[str, str]]()
    other = server.Process(target=second_rank, args=(file, build))
    other.start()
    with noting(notes):
        ranks = Ranks(0, 2, CUDA, file=file)
        ranks.compare(FACTS)
        learner: Learner = learner_of(build, ranks, device=CUDA)
        given = features().to(CUDA)
        parallel = begin(ranks, learner, Beginning(OWN, None, 8), given, torch.arange(ROWS).numpy())
        for batch in BATCHES:
            stepped(learner, parallel(batch).square().mean())
        parallel.random_states()
        ranks.check_all_alive()
        ranks.close()
    other.join(60)
    assert other.exitcode == 0
    of_other = json.loads(file.with_suffix(".json").read_text())
    ends = [("send", "recv_"), ("recv_", "send"), ("allreduce_",) * 2, ("broadcast_",) * 2]
    for own_end, other_end in ends:
        devices = [where for what, where in notes if what == own_end]
        assert devices == [where for what, where in of_other if what == other_end]
        assert {*devices} >= {"cpu"}
    assert {what for what, _ in notes} == {what for what, _ in ends}
    assert {what for what, where in notes if where == "cuda"} == {"send", "recv_", "allreduce_"}
    assert next(what for what, where in notes if where == "cuda") == "allreduce_"
