"""Autocast and compiled models change training alone: no name, evaluation, prediction or dtype."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from splitveil.common.errors import SplitveilError
from splitveil.common.models.device import speed_up
from splitveil.passive_party.bottom_trainer import stashing_weights
from tests.support.equality import assert_same_weights
from tests.support.peers import Lost, dying
from tests.support.runs import build_parties, run_in_process

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="there is no C++ compiler"
)
BFLOAT16 = "autocast=bfloat16"
SEEDED = ["insecure_nonce_seed=1", "defense={name: marvell, insecure_noise_seed: 3}"]

# Of torch's compiler itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def rows(count: int = 5) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1))


def test_a_training_pass_is_that_of_autocast_in_float32() -> None:
    plain, fast = model(), model()
    speed_up(fast, "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(rows())
    found = fast(rows())
    assert expected.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())
    assert not torch.equal(found, plain(rows()))
    found.sum().backward()
    assert {p.grad.dtype for p in fast.parameters() if p.grad is not None} == {torch.float32}


def test_names_and_evaluations_stay_and_a_copy_is_independent() -> None:
    plain, fast = model(), model()
    speed_up(fast, "bfloat16")
    assert list(fast.state_dict()) == list(plain.state_dict())
    copied = copy.deepcopy(fast)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert torch.equal(fast.eval()(rows()), plain.eval()(rows()))
    assert not torch.equal(copied.eval()(rows()), plain(rows()))


def test_autocast_ends_also_after_an_error() -> None:
    fast = model()
    speed_up(fast, "bfloat16")
    with pytest.raises(RuntimeError):
        fast(torch.ones(2, 5))
    assert not torch.is_autocast_enabled("cpu")
    assert fast(rows()).dtype == torch.float32


@NEEDS_COMPILER
def test_a_compiled_model_trains_alike_and_evaluates_with_the_same_bits() -> None:
    """For any number of rows, and with two backward passes through one graph, as in a step."""
    plain, fast = model(), model()
    speed_up(fast, None, compiled=True)
    for count in (5, 3, 8):
        given = rows(count).requires_grad_()
        found = fast(given)
        torch.testing.assert_close(found, plain(rows(count)))
        torch.autograd.grad(found.sum(), given, retain_graph=True)
        found.sum().backward()
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert torch.equal(fast.eval()(rows()), plain.eval()(rows()))


@NEEDS_COMPILER
def test_the_hooks_that_stash_weights_are_not_compiled() -> None:
    fast = model()
    speed_up(fast, None, compiled=True)
    compiled = counters["frames"]["ok"]
    for _ in range(3):
        with stashing_weights(fast):
            found = fast(rows())
        found.sum().backward()
    assert counters["frames"]["ok"] - compiled <= 1


def test_autocast_of_either_party_is_another_course(example: Path) -> None:
    courses = []
    for active, passive in (([], []), ([BFLOAT16], []), ([], [BFLOAT16])):
        parties = build_parties(example, [*SEEDED, *active], ["insecure_nonce_seed=2", *passive])
        run_in_process(parties)
        courses.append(parties.weights())
    plain, *others = courses
    for found in others:
        assert any(not torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("fast", "other"),
    [(BFLOAT16, "autocast=null"), pytest.param("compile=true", BFLOAT16, marks=NEEDS_COMPILER)],
)
def test_a_run_resumes_with_the_same_bits_and_not_with_another_arithmetic(
    example: Path, tmp_path: Path, fast: str, other: str
) -> None:
    shared = ["contract.epochs=3", "contract.checkpoint_steps=2", fast]
    active, passive = [*shared, *SEEDED], [*shared, "insecure_nonce_seed=2"]
    whole = build_parties(example, active, passive)
    run_in_process(whole)
    runs = tmp_path / "runs"
    with pytest.raises(Lost):
        run_in_process(build_parties(example, active, passive, runs=runs), dying(6, after=False))
    shutil.copytree(runs, tmp_path / "copy")
    again = build_parties(example, active, passive, runs=runs)
    assert again.session.reopen()
    run_in_process(again)
    assert_same_weights(again.weights(), whole.weights())
    changed = build_parties(example, active, [*passive, other], runs=tmp_path / "copy")
    assert changed.session.reopen()
    with pytest.raises(SplitveilError, match="other bytes"):
        run_in_process(changed)


@NEEDS_COMPILER
def test_a_compiled_run_shows_the_adversary_the_same_layers(example: Path) -> None:
    """Without noise, so that both runs follow the same course but for rounding."""
    seen = []
    for more in ([], ["compile=true"]):
        parties = build_parties(
            example,
            ["insecure_nonce_seed=1", "contract.epochs=1", *more],
            ["insecure_nonce_seed=2", "contract.epochs=1", *more],
        )
        run_in_process(parties)
        seen.append(parties.passive)
    plain, compiled = seen
    assert plain.layers[0]
    for expected, found in zip(plain.layers, compiled.layers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    for expected_cut, found_cut in zip(plain.received, compiled.received, strict=True):
        torch.testing.assert_close(found_cut, expected_cut, rtol=1e-3, atol=1e-6)
