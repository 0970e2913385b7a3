"""The noise key on disk, and whole runs whose noise is drawn from it."""

import csv
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from splitveil.active_party.commands.program import parser, run
from splitveil.active_party.defenses import noisy_label
from splitveil.active_party.defenses.example_keys import (
    key_for,
    load_or_create_key,
    used_labels_file,
)
from splitveil.active_party.defenses.noisy_label import LabelMechanism, NoisyLabel
from splitveil.active_party.ledger import stored_labels
from splitveil.active_party.ledger.account_book import LEDGER
from splitveil.active_party.ledger.stored_labels import labels_first_used
from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.record import run_folder
from splitveil.common.record.model_files import save_tensors
from splitveil.common.record.run_folder import open_run_folder
from tests.support.peers import Lost, dying
from tests.support.runs import Parties, build_parties, run_in_process, write_example

PERSISTENT = ["iso", "max_norm", "max_norm_positive", "marvell"]
MECHANISMS = [
    "{kind: gaussian, noise_ratio: 2.0}",
    "{kind: laplace, epsilon: 1.0}",
    "{kind: randomized_response, epsilon: 1.0}",
    "{kind: gaussian, noise_ratio: 2.0, posterior: model}",
    "{kind: alibi, epsilon: 1.0}",
]
KEYED = [f"{{name: {name}, noise: persistent}}" for name in PERSISTENT] + [
    f"{{name: noisy_label, mechanism: {mechanism}}}" for mechanism in MECHANISMS
]


# ---- the file


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_never_open_to_others_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is born with its final mode and under a name that did not exist."""
    created: list[tuple[int, int]] = []
    real = os.open

    def watching(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not Path(path).exists():
            created.append((flags, mode))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", watching)
    before = os.umask(0)
    try:
        key = load_or_create_key(tmp_path / "checkpoint" / "noise.key")
    finally:
        os.umask(before)
    assert len(key) == 32
    assert [mode for _, mode in created] == [0o600, 0o600]
    assert created[1][0] & os.O_EXCL
    assert {path.name: mode_of(path) for path in (tmp_path / "checkpoint").iterdir()} == {
        "noise.key": 0o600,
        "noise.key.labels": 0o600,
    }


def test_workers_that_start_together_agree_on_a_key(tmp_path: Path) -> None:
    keys: list[bytes] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        keys.append(load_or_create_key(tmp_path / "noise.key"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o610])
def test_a_key_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "noise.key"
    load_or_create_key(path)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=f"mode {mode:04o}.*expected 0600"):
        load_or_create_key(path)
    path.chmod(0o600)
    load_or_create_key(path)


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_create_key(tmp_path / "noise.key")
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(SettingsError, match="belongs to user"):
        load_or_create_key(tmp_path / "noise.key")


def _link(path: Path) -> None:
    load_or_create_key(path.with_name("real.key"))
    path.symlink_to(path.with_name("real.key"))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: path.write_bytes(b""), "32 bytes"),
        (lambda path: path.write_bytes(bytes(31)), "32 bytes"),
        (lambda path: path.write_bytes(bytes(33)), "32 bytes"),
        (lambda path: path.mkdir(), "something else"),
        (os.mkfifo, "something else"),
        (_link, "cannot be read"),
        (lambda path: path.symlink_to(path.with_name("nothing")), "cannot be read"),
    ],
)
def test_what_is_no_key_is_refused(
    tmp_path: Path, make: Callable[[Path], object], complaint: str
) -> None:
    path = tmp_path / "noise.key"
    used_labels_file(path).touch()
    make(path)
    if not path.is_symlink():
        path.chmod(0o600)
    with pytest.raises(SettingsError, match=complaint):
        load_or_create_key(path)


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        load_or_create_key(tmp_path / "file" / "noise.key")


# ---- whole runs


def parties_of(example: Path, runs: Path, defense: str, more: Sequence[str] = ()) -> Parties:
    return build_parties(example, [f"defense={defense}", f"runs_dir={runs}", *more])


def key_path(runs: Path) -> Path:
    return runs / "small" / "active" / "checkpoint" / "noise.key"


def noise_of(parties: Parties) -> Tensor:
    """Return the source of a trainer's noise: secret bits, or noisy minus true labels."""
    trainer = parties.session.lifecycle.trainer
    assert trainer is not None
    if isinstance(trainer.defense, NoisyLabel):
        noisy = trainer.defense.noisy_labels
        assert noisy is not None
        labels = trainer._labels
        return noisy - (labels if noisy.ndim == 1 else torch.nn.functional.one_hot(labels.long()))
    assert trainer._example_keys is not None
    return trainer._example_keys


@pytest.mark.parametrize("defense", [KEYED[0], KEYED[3], KEYED[6]])
def test_a_run_trains_with_noise_from_its_key_and_names_it_nowhere(
    example: Path, tmp_path: Path, defense: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    parties = parties_of(example, tmp_path, defense)
    assert mode_of(key_path(tmp_path)) == 0o600  # before anything is trained
    run_in_process(parties)
    assert len(parties.active.evaluations) == 4
    for sent, received in zip(parties.active.sent, parties.passive.received, strict=True):
        assert torch.equal(sent, received)
        assert torch.isfinite(received).all()
    key = key_path(tmp_path).read_bytes()
    assert key.hex() not in caplog.text
    assert repr(key) not in caplog.text


@pytest.mark.parametrize(
    "defense", ["none", "marvell", "marvell, noise: persistent, insecure_noise_seed: 3"]
)
def test_a_run_that_needs_no_key_makes_none(example: Path, tmp_path: Path, defense: str) -> None:
    run_in_process(parties_of(example, tmp_path, f"{{name: {defense}}}"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("defense", [KEYED[3], KEYED[4], KEYED[6]])
def test_a_run_that_resumes_keeps_its_noise_and_a_new_one_draws_its_own(
    example: Path, tmp_path: Path, defense: str
) -> None:
    def run() -> Tensor:
        parties = parties_of(example, tmp_path, defense)
        run_in_process(parties)
        return noise_of(parties)

    first, resumed = run(), run()
    open_run_folder(tmp_path, "small", "active")  # what a new start does with an old run's results
    fresh = run()
    assert torch.equal(first, resumed)
    assert (first != fresh).float().mean() > (0.3 if "randomized" in defense else 0.99)


def test_a_key_at_a_path_of_its_own_is_used_there(example: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "mine.key"
    parties = parties_of(example, tmp_path, KEYED[3], [f"noise_key_path={path}"])
    assert mode_of(path) == 0o600
    assert not key_path(tmp_path).exists()
    assert parties.active_settings.noise_key_file() == path
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="expected 0600"):
        parties_of(example, tmp_path, KEYED[3], [f"noise_key_path={path}"])


def test_a_lost_key_is_found_by_check(
    example: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.key"
    used_labels_file(path).write_bytes(b"used")
    settings = [f"noise_key_path={path}", f"defense={KEYED[3]}", f"listen=127.0.0.1:{port}"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert run(parser().parse_args(["check", str(example / "active.yaml"), *arguments])) == 2
    printed = capsys.readouterr()
    assert "the noise key is missing" in printed.out + printed.err
    assert not path.exists()


def with_other_labels(example: Path, folder: Path, every: int = 3) -> Path:
    """Copy the example with every third label turned round, and that label in a column as well."""
    write_example(folder)
    lines = (example / "active.csv").read_text().splitlines()
    lines[0] += ",corrected"
    for number, line in enumerate(lines[1:], 1):
        name, label, rest = line.split(",", 2)
        turned = 1 - int(label) if number % every == 1 else int(label)
        lines[number] = f"{name},{turned},{rest},{turned}"
    (folder / "active.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    "settings",
    ["top_labels: noisy", "top_labels: true", "mechanism: {kind: gaussian, posterior: model}"],
)
def test_with_noisy_top_labels_the_true_ones_change_no_bit_of_what_the_peer_gets(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    """The same noisy labels, other true ones. With true top labels the same test finds the leak."""
    noisy: dict[str, float] = {}

    def draw_once(
        mechanism: LabelMechanism, labels: Tensor, key: bytes, ids: list[str], num_classes: int
    ) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        for name, label in zip(ids, labels.tolist(), strict=True):
            noisy.setdefault(name, label + float(torch.randn((), generator=generator)))
        return torch.tensor([noisy[name] for name in ids])

    monkeypatch.setattr(noisy_label, "draw_noisy_labels", draw_once)
    defense = f"{{name: noisy_label, {settings}}}"
    received, weights = [], []
    for folder in (example, with_other_labels(example, tmp_path / "other")):
        parties = parties_of(folder, tmp_path / folder.name, defense)  # with a key of its own
        run_in_process(parties)
        received.append(torch.cat(parties.passive.received))
        weights.append(parties.weights())
    same = torch.equal(received[0], received[1])
    assert same is ("true" not in settings)
    assert all(torch.equal(weights[1][n], v) for n, v in weights[0].items()) is same


# ---- a second run with the same key


def by_id(parties: Parties) -> dict[str, tuple[float, ...]]:
    trainer, session = parties.session.lifecycle.trainer, parties.session
    assert trainer is not None
    train = session.lifecycle.answering.rows.splits["train"].tolist()
    rows = session.lifecycle.answering.rows.file_rows
    labels, noise = trainer._labels, noise_of(parties)
    return {
        session.ids[rows[at]]: (float(labels[at]), *noise[at].flatten().tolist()) for at in train
    }


@pytest.mark.parametrize(
    ("defense", "column"),
    [
        (KEYED[1], "label"),
        (KEYED[3], "label"),
        (KEYED[4], "label"),
        (KEYED[8], "label"),
        (KEYED[3], "corrected"),
        (KEYED[4], "corrected"),
    ],
)
def test_a_second_run_on_other_labels_reveals_what_its_ledger_says(
    example: Path, tmp_path: Path, defense: str, column: str
) -> None:
    """In the same column nothing new; in another one a second draw.

    With the same noise on both labels, the difference of two answers would be that of the labels.
    """
    other = with_other_labels(example, tmp_path / "other", every=2)
    key = f"noise_key_path={tmp_path / 'mine.key'}"
    first = parties_of(example, tmp_path / "first", defense, [key])
    run_in_process(first)
    save_tensors(tmp_path, LEDGER, first.session.lifecycle.account_book().state_dict())
    after = [
        key,
        f"earlier_ledgers=[{tmp_path / 'checkpoint'}]",
        "insecure_nonce_seed=44",  # another split
        f"data.label_column={column}",
    ]
    second = parties_of(other, tmp_path / "second", defense, after)
    run_in_process(second)
    before, now = by_id(first), by_id(second)
    common = before.keys() & now.keys()
    assert 100 < len(common) < len(now)
    once, both = (one.session.leak_bounds().sum_kl.max for one in (first, second))
    if column == "label":
        assert all(now[name] == before[name] for name in common)
        assert both == once
    else:
        assert any(now[name][0] != before[name][0] for name in common)
        repeated = sum(now[name][1:] == before[name][1:] for name in common)
        assert repeated < (0.8 if "randomized" in defense else 0.01) * len(common)
        assert both == pytest.approx(2 * once)
    lines = {
        name: float(label)
        for name, label, *_ in csv.reader((other / "active.csv").read_text().splitlines()[1:])
    }
    new = now.keys() - before.keys()
    assert all(now[name][0] == lines[name] for name in new)  # as the file says now


def test_the_labels_that_a_key_was_used_for_are_its_owner_s_alone(
    example: Path, tmp_path: Path
) -> None:
    run_in_process(parties_of(example, tmp_path, KEYED[3]))
    used = key_path(tmp_path).with_name("noise.key.labels")
    assert mode_of(used) == 0o600
    stored = load_file(used)
    assert stored["examples"].shape == (len(stored["labels"]), 16)
    assert b"person-" not in used.read_bytes()


@pytest.mark.parametrize("harm", ["key", "labels", "both", "damaged", "changed"])
def test_a_key_that_is_not_what_it_was_is_refused_and_not_drawn_anew(
    example: Path, tmp_path: Path, harm: str
) -> None:
    def parties() -> Parties:
        settings = [f"defense={KEYED[4]}", f"runs_dir={tmp_path}"]
        return build_parties(example, settings, runs=tmp_path / "runs")

    with pytest.raises(Lost):
        run_in_process(parties(), dying(7, after=True))
    path = key_path(tmp_path)
    used = used_labels_file(path)
    whole = path.read_bytes(), used.read_bytes()
    match harm:
        case "key":
            path.unlink()
        case "labels":
            used.unlink()
        case "both":
            path.unlink()
            used.unlink()
        case "damaged":
            used.write_bytes(whole[1][:-3])
        case "changed":
            path.write_bytes(bytes(32))
    says = {
        "key": "the noise key is missing",
        "labels": "expected noise.key.labels beside the noise key",
        "damaged": "not the labels for which noise.key was last used",
        "both": "not the noise key with which the run began",
        "changed": "not the labels for which noise.key was last used",
    }[harm]
    with pytest.raises(SettingsError, match=says) as caught:
        parties().session.reopen()
    assert caught.value.exit_code == 2
    assert path.exists() is (harm != "key")
    path.write_bytes(whole[0])
    path.chmod(0o600)
    used.write_bytes(whole[1])
    again = parties()
    again.session.reopen()
    run_in_process(again)
    assert again.session.stage is Stage.FINISHED


LABELS = torch.tensor([0.0, 1.0, 1.0])


def use(path: Path, ids: Sequence[str], labels: Tensor = LABELS) -> list[float]:
    key = key_for(load_or_create_key(path), "a strength")
    return labels_first_used(path, key, ids, labels[: len(ids)]).tolist()


def another_key_s(path: Path) -> bytes:
    other = path.with_name("other.key")
    use(other, ["ann", "bob"])
    return used_labels_file(other).read_bytes()


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda path, _before: used_labels_file(path).write_bytes(b""), id="emptied"),
        pytest.param(lambda path, _before: os.truncate(used_labels_file(path), 100), id="cut off"),
        pytest.param(
            lambda path, before: used_labels_file(path).write_bytes(before), id="an older copy"
        ),
        pytest.param(
            lambda path, _before: used_labels_file(path).write_bytes(another_key_s(path)),
            id="another key's",
        ),
        pytest.param(
            lambda path, _before: used_labels_file(path).write_bytes(
                save({"examples": torch.empty(0, 16, dtype=torch.uint8), "labels": torch.empty(0)})
            ),
            id="whole and without rows",
        ),
        pytest.param(lambda path, _before: used_labels_file(path).unlink(), id="deleted"),
        pytest.param(lambda path, _before: os.truncate(path, 32), id="the key's mark cut off"),
    ],
)
def test_a_used_key_never_draws_for_other_labels_than_those_it_was_used_for(
    tmp_path: Path, harm: Callable[[Path, bytes], object]
) -> None:
    """With the same noise on both labels, the answers differ by the labels exactly."""
    path = tmp_path / "noise.key"
    use(path, ["ann", "bob"])
    before = used_labels_file(path).read_bytes()
    use(path, ["ann", "bob", "cid"])
    whole = path.read_bytes(), used_labels_file(path).read_bytes()
    harm(path, before)
    for _ in range(2):  # a refusal mends nothing
        with pytest.raises(SettingsError, match="would reveal both labels"):
            use(path, ["ann", "bob", "cid"], 1 - LABELS)
    path.write_bytes(whole[0])
    used_labels_file(path).write_bytes(whole[1])
    assert use(path, ["ann", "bob", "cid"], 1 - LABELS) == LABELS.tolist()


@pytest.mark.parametrize("writes", [0, 1])
def test_a_process_that_dies_while_it_notes_labels_leaves_a_key_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Killed before the labels are replaced, and after it: the noise has not been drawn yet."""
    path = tmp_path / "noise.key"
    use(path, ["ann", "bob"])
    real = run_folder.write_bytes_atomically

    def killed(file: Path, *parts: bytes) -> None:
        if writes:
            real(file, *parts)
        raise Lost

    monkeypatch.setattr(stored_labels, "write_bytes_atomically", killed)
    with pytest.raises(Lost):
        use(path, ["ann", "bob", "cid"])
    monkeypatch.undo()
    between = used_labels_file(path).read_bytes()
    now = [0.0, 1.0, 1.0 if writes else 0.0]  # only where the label was noted does it stay
    assert use(path, ["ann", "bob", "cid"], 1 - LABELS) == now
    if not writes:
        used_labels_file(path).write_bytes(between)
        with pytest.raises(SettingsError, match="would reveal both labels"):
            use(path, ["ann", "bob", "cid"])


def test_a_copy_of_a_used_key_is_used_only_with_its_labels(tmp_path: Path) -> None:
    path, copy = tmp_path / "noise.key", tmp_path / "copy.key"
    use(path, ["ann"])
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    used_labels_file(copy).touch()
    with pytest.raises(SettingsError, match=r"not the labels for which copy\.key was last used"):
        load_or_create_key(copy)
    used_labels_file(copy).write_bytes(used_labels_file(path).read_bytes())
    assert use(copy, ["ann"], 1 - LABELS) == [0.0]


def test_a_key_for_several_runs_needs_ids(example: Path) -> None:
    with pytest.raises(SettingsError, match=r"noise_key_path: needs data\.id_column"):
        build_parties(example, ["noise_key_path=mine.key", "data.id_column=null"])
