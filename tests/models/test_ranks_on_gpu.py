"""What the ranks of a party send each other when they compute on a GPU, which is pretended."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.models.test_data_parallel import (
    BATCHES,
    begun,
    learner_of,
    normalised,
    ranks_of,
    sparse,
    stepped,
)
from tests.support import pretended_cuda

CUDA = pretended_cuda.CUDA


@contextmanager
def pretending(folder: Path, rank: int) -> Iterator[None]:
    """Pretend that there is a GPU, with gloo in the place of NCCL; note what is sent from where."""
    notes: list[tuple[str, str]] = []
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
    (folder / str(rank)).write_text(json.dumps(notes))


@pytest.mark.parametrize("model", [normalised, sparse])
def test_both_ends_of_a_transfer_are_on_one_device_and_nccl_begins_with_all_ranks(
    model: Any, tmp_path: Path
) -> None:
    build, on = partial(learner_of, model, device=CUDA), partial(pretending, tmp_path)
    with ranks_of(2, build, on=on, device=CUDA) as ranks:
        learner = build(ranks)
        parallel = begun(ranks, learner)
        for batch in BATCHES:
            stepped(learner, parallel(batch).square().mean())
        parallel.random_states()
        ranks.check_all_alive()
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    ends = [("send", "recv_"), ("recv_", "send"), ("allreduce_",) * 2, ("broadcast_",) * 2]
    for one, other in ends:
        devices = [where for what, where in first if what == one]
        assert devices == [where for what, where in second if what == other]
    assert {what for what, _ in first} == {one for one, _ in ends}
    on_gpu = [what for what, where in first if where == "cuda"]
    assert (on_gpu[0], {*on_gpu}) == ("allreduce_", {"send", "recv_", "allreduce_"})
