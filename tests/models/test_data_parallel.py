"""A model that several processes compute, each the rows that it owns."""

import copy
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _set_pg_timeout
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.models import ranks as ranks_module
from splitveil.common.models.data_parallel import (
    Beginning,
    DataParallelModel,
    Learner,
    begin,
    with_whole_batches,
    work,
)
from splitveil.common.models.dense import ConvTop
from splitveil.common.models.device import speed_up
from splitveil.common.models.factory import build_bottom_model, build_top_model
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.ranks import RankLost, Ranks
from splitveil.common.models.settings import (
    SPARSE_FROM_ROWS,
    AdamOptimizer,
    ConvModel,
    MlpModel,
    SgdOptimizer,
    TabularModel,
    WideDeepModel,
)
from splitveil.passive_party.bottom_trainer import LayerTap, stashing_weights
from tests.support.forked import server

CPU = torch.device("cpu")
# Two processes compile, for as long as all other cases take; test_speed.py compiles for one.
COMPILED = (
    pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler"),
    pytest.mark.slow,
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
OWN = FeatureShapes(3, (5, 4))
ROWS = 90
SGD = SgdOptimizer(kind="sgd", learning_rate=0.1)
FACTS = {"optimizer": "sgd", "torch": "2"}
Build = Callable[[], nn.Module]


def learner_of(
    build: Build,
    ranks: Ranks | None = None,
    _: Any = None,
    *,
    depth: int = 1,
    device: Any = CPU,
    **how: Any,
) -> Learner:
    """Return a learner; as all ranks build it, or the only one."""
    torch.manual_seed(1 + (ranks.rank if ranks else 0))  # so the weights have to come from rank 0
    model = build().to(device)
    speed_up(model, how.get("autocast"), compiled=how.get("compiled", False))
    taps = {"head": LayerTap(model.head).take} if isinstance(model, Parts) else {}
    optimizer = build_optimizer(how.get("optimizer", SGD), model)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Learner(
        model, optimizer, schedule, device, taps, depth, partial(stashing_weights, model)
    )


def compute(rank: int, size: int, file: Path, facts: Any, build: Any, on: Any, device: Any) -> None:
    torch.set_num_threads(1)
    with on(rank):
        ranks = Ranks(rank, size, device, file=file)
        ranks.compare(facts)
        work(ranks, partial(build, ranks))
        ranks.close()


@contextmanager
def ranks_of(
    size: int,
    build: Any,
    facts: Any = FACTS,
    code: int = 0,
    on: Any = nullcontext,
    device: Any = CPU,
) -> Iterator[Ranks]:
    """Start the other ranks, which build their learners so, and let them end in the end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ranks")
        given = (size, file, facts, build, on, device)
        others = [server.Process(target=compute, args=(rank, *given)) for rank in range(1, size)]
        for process in others:
            process.start()
        with on(0):
            ranks = Ranks(0, size, device, file=file)
            try:
                ranks.compare(FACTS)
                yield ranks
            finally:
                ranks.close()
        for process in others:
            process.join(60)
            assert process.exitcode == code


def features() -> Features:
    torch.manual_seed(7)
    return Features(torch.randn(ROWS, 3), torch.randint(0, 4, (ROWS, 2)))


def top() -> nn.Module:
    return ConvTop(ConvModel(kind="conv", channels=(4,), hidden=(8,)), (6, 8, 8), OWN)


class Parts(nn.Module):
    """Takes features; some weights are not trained, and some not used."""

    def __init__(self, first: nn.Module, table: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.table = first, table or nn.Embedding(5, 4)
        self.head, self.idle = nn.Linear(4, 2), nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, given: Features) -> Tensor:
        assert given.numeric is not None
        assert given.categorical is not None
        slots = self.table(given.categorical).sum(1)
        found: Tensor = self.head(self.first(given.numeric) + slots) * self.frozen
        return found


def normalised() -> nn.Module:
    return Parts(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()))


def averaged() -> nn.Module:
    first = nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.BatchNorm1d(3, affine=False, momentum=None),
        nn.Flatten(),
        nn.Linear(3, 4),
    )
    return Parts(first)


def dense() -> nn.Module:
    return Parts(nn.Linear(3, 4))


def sparse() -> nn.Module:
    return Parts(nn.Linear(3, 4), nn.Embedding(SPARSE_FROM_ROWS, 4, sparse=True))


def dropping() -> nn.Module:
    return Parts(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)))


def stepped(learner: Learner, loss: Tensor) -> None:
    learner.optimizer.zero_grad()
    torch.autograd.backward(loss)
    learner.optimizer.step()
    learner.schedule.step()


BATCHES = (
    torch.arange(40),
    torch.tensor([6, 3, 12, 0, 9, 30, 21]),  # all of rank 0 of three, or mixed
    torch.tensor([5, 7]),
    torch.arange(80, 49, -1),
)


def begun(ranks: Ranks, learner: Learner) -> DataParallelModel:
    beginning = Beginning(OWN, None, 8)
    given = features().to(learner.device)
    return begin(ranks, learner, beginning, given, torch.arange(ROWS).numpy())


@pytest.mark.parametrize(
    ("model", "how", "size"),
    [
        (dense, {}, 2),
        (dense, {"optimizer": AdamOptimizer(kind="adam")}, 3),
        (dense, {"optimizer": SGD.model_copy(update={"clip_norm": 0.1})}, 2),
        (normalised, {}, 3),
        (averaged, {}, 2),
        (sparse, {}, 2),
        (sparse, {"optimizer": AdamOptimizer(kind="adam")}, 3),
        (normalised, {"autocast": "bfloat16"}, 2),
        pytest.param(normalised, {"compiled": True}, 2, marks=COMPILED),
    ],
)
def test_several_ranks_learn_what_one_does(model: Build, how: Any, size: int) -> None:
    """Also from batches of which a rank has no row."""
    alone = learner_of(model, **how)
    given, taps = features(), []
    for batch in BATCHES:
        stepped(alone, alone.model(given.rows(batch)).square().mean())
        taps.append(alone.taps["head"]())
    with ranks_of(size, partial(learner_of, model, **how)) as ranks:
        learner = learner_of(model, ranks, **how)
        learner.model.load_state_dict(learner_of(model).model.state_dict())
        parallel = begun(ranks, learner)
        for batch, tap in zip(BATCHES, taps, strict=True):
            stepped(learner, parallel(batch).square().mean())
            close(parallel.taps["head"](), tap, how)
        # As in a refit, a copy trains while the other ranks wait for orders.
        close(copy.deepcopy(learner.model)(given), copy.deepcopy(alone.model)(given), how)
        assert not any(buffer.requires_grad for buffer in learner.model.buffers())
        parallel.random_states()  # all ranks have the same weights
    for name, value in learner.model.state_dict().items():
        close(value, alone.model.state_dict()[name], how)
    assert isinstance(learner.model, Parts)
    assert learner.model.idle.weight.grad is None


def close(found: Any, expected: Any, how: Any) -> None:
    atol = 5e-3 if "autocast" in how else 1e-5
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_an_answer_can_be_computed_before_the_top_model_learns(size: int) -> None:
    alone, given = learner_of(top), features()
    with ranks_of(size, partial(learner_of, top)) as ranks:
        learner = learner_of(top, ranks)
        beginning = Beginning(OWN, (6, 8, 8), 8)
        parallel = begin(ranks, learner, beginning, given, torch.arange(ROWS).numpy())
        for batch in BATCHES:
            cut = torch.randn(len(batch), 6, 8, 8)
            raw: list[Tensor] = []
            for one, outputs_of in (
                (learner, partial(parallel, batch)),
                (alone, lambda cut: alone.model(cut, given.rows(batch))),  # noqa: B023
            ):
                own = cut.clone().requires_grad_()
                loss = outputs_of(own).square().mean()
                raw += torch.autograd.grad(loss, own, retain_graph=True)
                stepped(one, loss)
            torch.testing.assert_close(*raw)
        parallel.random_states()
    for weight, other in zip(learner.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(weight, other)


def test_a_gradient_may_come_when_newer_batches_have_been_learned_from() -> None:
    """As with a pipeline: each gradient is that of the weights of its activation."""

    def trained(learner: Learner, compute: Any) -> list[Tensor]:
        waiting = []
        for batch in BATCHES:
            with stashing_weights(learner.model):
                waiting.append(compute(batch))
            if len(waiting) == 2:
                stepped(learner, waiting.pop(0).square().sum())
        return list(learner.model.parameters())

    alone, given = learner_of(dense), features()
    expected = trained(alone, lambda batch: alone.model(given.rows(batch)))
    with ranks_of(2, partial(learner_of, dense, depth=2)) as ranks:
        learner = learner_of(dense, ranks, depth=2)
        found = trained(learner, begun(ranks, learner))
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)


def test_steps_that_are_computed_again_from_a_state_have_the_same_bits() -> None:
    """Each rank goes back to its own random state, and drops other values than the others."""
    with ranks_of(3, partial(learner_of, dropping)) as ranks:
        learner = learner_of(dropping, ranks)
        parallel = begun(ranks, learner)

        def go_on() -> list[Tensor]:
            outputs = []
            for _ in range(3):
                outputs.append(parallel(torch.tensor([0, 1, 2, 3, 4, 5])))
                stepped(learner, outputs[-1].square().sum())
            return [*outputs, *(one.clone() for one in learner.model.parameters())]

        parallel(torch.arange(3))
        parts: tuple[Any, ...] = learner[:3]
        begun_with = copy.deepcopy([one.state_dict() for one in parts])
        random = torch.get_rng_state(), parallel.random_states()
        first = go_on()
        for one, state in zip(parts, begun_with, strict=True):
            one.load_state_dict(state)
        torch.set_rng_state(random[0])
        parallel.share(random[1])
        assert all(map(torch.equal, first, go_on()))
        assert len({bytes(one.numpy()) for one in parallel.random_states()}) == 2


class Checkpointed(nn.Module):
    """Computes its layers again to go backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Tanh())

    def forward(self, given: Features) -> Tensor:
        found: Tensor = checkpoint(self.layers, given.numeric, use_reentrant=False)
        return found


def test_a_batch_norm_that_is_computed_again_sees_the_whole_batch() -> None:
    alone, given = learner_of(Checkpointed), features()
    for batch in BATCHES:
        stepped(alone, alone.model(given.rows(batch)).pow(3).sum())
    with ranks_of(2, partial(learner_of, Checkpointed)) as ranks:
        learner = learner_of(Checkpointed, ranks)
        parallel = begun(ranks, learner)
        for batch in BATCHES:
            stepped(learner, parallel(batch).pow(3).sum())
    for weight, other in zip(learner.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, atol=1e-5, rtol=1e-4)


class OwnNorm(nn.BatchNorm1d):
    pass


def test_a_batch_norm_of_the_users_own_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"^1: several processes cannot compute OwnNorm over"):
        with_whole_batches(nn.Sequential(nn.Linear(3, 4), OwnNorm(4)))


def stranger(file: Path) -> None:
    """Connect as rank 1, and answer something."""
    store = PrefixStore("splitveil/0", dist.FileStore(str(file), 2))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=1, world_size=2, store=store)
    given = [torch.zeros(32, dtype=torch.uint8) for _ in range(2)]
    ways = [dist.P2POp(dist.isend, given[0], 0), dist.P2POp(dist.irecv, given[1], 0)]
    for one in dist.batch_isend_irecv(ways):
        one.wait()


def test_what_connects_without_the_secret_is_no_rank(tmp_path: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    process = server.Process(target=stranger, args=(tmp_path / "ranks",))
    process.start()
    with pytest.raises(RankLost, match="what connected as rank 1 is no process of this party"):
        Ranks(0, 2, file=tmp_path / "ranks")
    process.join(60)
    assert process.exitcode == 0


def hanging(file: Path) -> None:
    Ranks(1, 2, file=file).compare(FACTS)
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    "ask",
    [
        Ranks.check_all_alive,
        lambda ranks: ranks.gather_rows(torch.ones(1, 2), torch.tensor([0, 1])),
        lambda ranks: ranks.add_up([torch.ones(3)]),
    ],
    ids=["sign of life", "rows", "sums"],
)
def test_a_rank_that_hangs_is_reported_after_the_time_out(
    ask: Callable[[Ranks], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    process = server.Process(target=hanging, args=(tmp_path / "ranks",))
    process.start()
    try:
        found = Ranks(0, 2, file=tmp_path / "ranks")
        found.compare(FACTS)
        for name in ("_WITHIN", "_ANSWERS_WITHIN"):
            monkeypatch.setattr(ranks_module, name, timedelta(milliseconds=100))
        _set_pg_timeout(timedelta(milliseconds=100))
        with pytest.raises(RankLost, match="another process of this party is gone, or hangs"):
            ask(found)
    finally:  # a stopped process outlives the tests
        process.kill()
    found.close()
    process.join()


NUMBERS, IMAGES = FeatureShapes(3, (5, 4)), FeatureShapes(image_shape=(1, 8, 8))
DENSE = (MlpModel(kind="mlp"), TabularModel(kind="tabular"), WideDeepModel(kind="wide_deep"))


@pytest.mark.parametrize("logits", [2, 3])
@pytest.mark.parametrize("settings", [*DENSE, ConvModel(kind="conv", channels=(4,))])
def test_models_compute_batches_of_no_rows(settings: Any, logits: int) -> None:
    is_conv = isinstance(settings, ConvModel)
    own, cut = (IMAGES, (4, 4, 4)) if is_conv else (NUMBERS, (128,))
    bottom = build_bottom_model(settings, own, cut, seed=1)
    assert bottom(own.zeros(0)).shape == (0, *cut)
    if is_conv:
        settings = settings.model_copy(update={"hidden": (8,)})
    for shapes in (None, NUMBERS) if not isinstance(settings, WideDeepModel) else (NUMBERS,):
        top = build_top_model(settings, cut, shapes, seed=1, num_classes=logits)
        outputs = top(torch.zeros(0, *cut), None if shapes is None else shapes.zeros(0))
        assert len(outputs) == 0
        outputs.sum().backward()


def test_ranks_whose_weights_differ_end_the_run() -> None:
    with ranks_of(2, partial(learner_of, dense), code=1) as ranks:
        learner = learner_of(dense, ranks)
        parallel = begun(ranks, learner)
        parallel.random_states()
        with torch.no_grad():
            learner.model.get_parameter("head.bias").add_(1e-6)
        with pytest.raises(SplitveilError, match="rank 1 has other weights than rank 0"):
            parallel.random_states()


def test_ranks_with_other_settings_are_refused_by_name() -> None:
    with (
        pytest.raises(SettingsError, match=r"^optimizer: rank 1 differs from rank 0"),
        ranks_of(2, partial(learner_of, dense), {"optimizer": "adam", "torch": "2"}),
    ):
        raise AssertionError


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2000), nn.Linear(2000, 500))

    def forward(self, given: Features) -> Tensor:
        found: Tensor = self.layers(given.numeric)
        return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads the bytes of each process in /proc")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_step_sends_at_most_twice_the_weights_from_each_rank(size: int) -> None:
    def sent(number: int) -> int:
        text = Path(f"/proc/{number}/io").read_text()
        return int(text.split("wchar: ")[1].split()[0])

    with ranks_of(size, partial(learner_of, Large)) as ranks:
        learner = learner_of(Large, ranks)
        parallel = begun(ranks, learner)
        every = [os.getpid(), *(one.pid for one in multiprocessing.active_children() if one.pid)]
        parallel.random_states()
        before = [sent(number) for number in every]
        for _ in range(3):
            stepped(learner, parallel(torch.arange(16)).sum())
        ranks.check_all_alive()
        after = [sent(number) for number in every]
    weights = sum(one.nbytes for one in learner.model.parameters())
    of_steps = [(now - then) / (3 * weights) for now, then in zip(after, before, strict=True)]
    assert len(of_steps) == size
    assert 2 * (size - 1) / size <= max(of_steps) <= 2.2, of_steps
