"""The command ``splitveil``: its sub-commands, their help, and JSON."""

import argparse
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from splitveil import simulate
from splitveil.active_party.commands import program as active_party
from splitveil.active_party.settings import ActiveSettings
from splitveil.command import program
from splitveil.command.program import SUB_COMMANDS
from splitveil.common.party import arguments
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.record.transcript import Transcript
from splitveil.experiments import __main__ as experiments
from splitveil.library.frames import as_html
from splitveil.passive_party.settings import PassiveSettings
from tests.support.programs import run_program
from tests.support.recorders import record
from tests.support.runs import write_example

HEAVY = ("torch", "grpc", "sklearn", "scipy", "pandas", "pyarrow")


class Done(NamedTuple):
    exit_code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Call = Callable[..., Done]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:

    def called(*words: object, main: Callable[[Sequence[str]], Any] = program.main) -> Done:
        with pytest.raises(SystemExit) as end:
            raise SystemExit(main([str(word) for word in words]))
        code = end.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return called


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folder")
    write_example(made)
    short = {"contract.epochs": 1}
    simulate(made, defense=["none", "iso"], settings=short, threads=1, runs=made / "runs")
    return made


def test_the_help_names_every_sub_command(call: Call) -> None:
    done = call("--help")
    assert done.exit_code == 0
    assert all(f"    {name} " in done.out for name in SUB_COMMANDS)
    assert call().out == done.out
    assert not [line for line in done.out.splitlines() if line.startswith("    active")]
    done = call("rnu")
    assert done.exit_code == 2
    assert "invalid choice: 'rnu'" in done.err
    assert done.err.endswith("; did you mean 'run'?\n")


def programs() -> Iterator[argparse.ArgumentParser]:
    owners: list[argparse.ArgumentParser] = [
        program._parser(),
        active_party.parser(),
        experiments._parser(),
        *(import_module(path).parser(f"splitveil {n}") for n, (_, path) in SUB_COMMANDS.items()),
    ]
    while owners:
        yield (one := owners.pop())
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                apart = {*SUB_COMMANDS} if one.prog == "splitveil" else set()
                owners += [made for name, made in action.choices.items() if name not in apart]


@pytest.mark.parametrize("parser", list(programs()), ids=lambda one: one.prog)
def test_the_help_of_every_command_ends_with_an_example_that_it_can_read(
    parser: argparse.ArgumentParser,
) -> None:
    if parser.prog.endswith("experiments list"):
        return  # it has nothing to add
    example = parser.format_help().partition("\nexample:\n")[2].strip().splitlines()[0]
    assert example.startswith(f"{parser.prog} ")
    parser.parse_args(shlex.split(example.removeprefix(parser.prog)))


@pytest.mark.parametrize(
    "words",
    [
        *([name, "--help"] for name in SUB_COMMANDS),
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["active", "run", "--help"],
    ],
    ids=" ".join,
)
def test_help_has_the_whole_name_and_imports_nothing_that_takes_long(words: list[str]) -> None:
    done = run_saying_what_is_heavy(words)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == f"heavy {['pyarrow'] * (words[0] == 'demo')}"
    if words[-1] == "--help":
        assert done.stdout.startswith(" ".join(["usage: splitveil", *words[:-1]]))


@pytest.mark.parametrize(
    "words",
    [
        ["run", "passive.yaml", "--set", "nothing_of_that_name=1"],
        ["check", "passive.yaml", "--set", "contract.epochs=none"],
        ["plan", "nothing_of_that_name.yaml"],
        ["active", "run", "passive.yaml"],
        ["run", "contract.yaml"],
        ["report", "runs/nothing_of_that_name"],
        ["predict", "active.yaml", "--ids", "nothing.csv", "--output", "predictions.csv"],
        ["passive", "run", "passive.yaml", "--set", "adversary={attacks: [nrom]}"],
        ["init", "passive", "nothing_of_that_name.csv"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_found_before_anything_is_imported_that_takes_long(
    words: list[str], folder: Path
) -> None:
    words = [str(folder / one) if (folder / one).exists() else one for one in words]
    done = run_saying_what_is_heavy(words)
    assert done.returncode in {2, 3}, done.stdout
    assert done.stdout.splitlines()[-1] == "heavy []"


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_feature_owner_of_one_pass_imports_no_network(command: str, folder: Path) -> None:
    """Neither torch nor scikit-learn: a table, its codes and a product."""
    changed = ["contract.exchange=one_shot", "bottom_model={kind: pca}", "adversary=null"]
    words = [word for one in changed for word in ("--set", one)]
    done = run_saying_what_is_heavy([command, str(folder / "passive.yaml"), *words])
    assert done.returncode == 0, done.stdout
    found = done.stdout.splitlines()[-1]
    assert "pyarrow" in found  # it did its work
    assert not {"'torch'", "'sklearn'", "'scipy'"} & {*found[7:-1].split(", ")}


def run_saying_what_is_heavy(words: list[str]) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, atexit, splitveil\n"
        f"atexit.register(lambda: print('heavy', [n for n in {HEAVY} if n in sys.modules]))\n"
        "from splitveil.command.program import main\n"
        f"main({words})"
    )
    return run_program(sys.executable, "-c", code)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run contract.yaml", "this is the contract, which all parties share; expected active.y"),
        ("passive check contract.yaml", "the contract, which all parties share; expected active.y"),
        ("active run passive.yaml", "passive.yaml: this is the feature owner's file; expected the"),
        ("passive run active.yaml", "active.yaml: this is the label owner's file; expected the ot"),
        ("run pasive.yaml", "there is no such file in {folder}; did you mean 'passive.yaml'?"),
        ("run empty.yaml", "empty.yaml: expected the settings of one party: the label owner's ha"),
        ("run passive.yaml --set defense.name=none", "expected the settings of one party: the la"),
        ("refit passive.yaml", "refit: for the label owner; passive.yaml is the other party's"),
        ("plan passive.yaml --target-leak-auc .6", "--target-leak-auc: for the label owner; "),
        ("report own --target-leak-auc .6", "--target-leak-auc: for the label owner; own is "),
    ],
)
def test_a_wrong_file_is_named_for_what_it_is(
    words: str, said: str, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("empty.yaml").write_text("")
    Path("own").mkdir(exist_ok=True)
    done = call(*words.split())
    assert done.exit_code == 2
    assert said.format(folder=folder) in done.err


@pytest.mark.parametrize(
    ("party", "own", "other"),
    [("active", ActiveSettings, PassiveSettings), ("passive", PassiveSettings, ActiveSettings)],
)
def test_the_names_that_tell_the_parties_files_apart_are_of_one_of_them(
    party: str, own: type[PartySettings], other: type[PartySettings]
) -> None:
    names = {*arguments._OWN_SETTINGS[party]}
    assert names <= own.model_fields.keys() - other.model_fields.keys()
    assert any(own.model_fields[name].is_required() for name in names)


@pytest.mark.parametrize("party", ["active", "passive"])
def test_align_writes_tables_only(party: str, folder: Path, call: Call) -> None:
    text = folder / "aligned.txt"
    done = call(party, "align", folder / f"{party}.yaml", "--output", text)
    assert (done.exit_code, done.out) == (2, "")
    assert "--output: expected a file ending in .parquet or .csv" in done.err
    assert f" {party} ERROR " in done.err


@pytest.mark.parametrize("read", ["active.csv", "ids.csv", "new.csv"])
def test_predictions_never_take_the_place_of_a_table_that_they_are_made_from(
    read: str, folder: Path, call: Call
) -> None:
    written = (folder / "active.csv").read_bytes()
    for name in ("ids.csv", "new.csv"):
        (folder / name).write_bytes(written)
    files = ("--ids", folder / "ids.csv", "--data", folder / "new.csv", "--output", folder / read)
    done = call("active", "predict", folder / "active.yaml", *files)
    assert done.exit_code == 2
    assert f"--output: {folder / read} is a table that this command reads" in done.err
    assert (folder / read).read_bytes() == written


def test_check_prints_settings_and_outcomes_as_json(folder: Path, call: Call) -> None:
    done = call("active", "check", folder / "active.yaml", "--json", "-q")
    assert done.exit_code == 0
    found = done.json()
    assert found["ok"] is True
    assert {one["ok"] for one in found["checks"]} == {True}
    assert any(one["found"].startswith("data: 380 rows") for one in found["checks"])
    assert found["settings"]["defense"]["name"] == "none"
    wrong = ("--set", "data.features.numeric=[nothing_of_that_name]")
    done = call("passive", "check", folder / "passive.yaml", "--json", *wrong)
    (refused,) = (one["found"] for one in done.json()["checks"] if not one["ok"])
    assert (done.exit_code, done.json()["ok"]) == (3, False)
    assert "nothing_of_that_name" in refused
    assert "nothing_of_that_name" in done.err


OBEYED = "a\x1b[2J\x9b\u202e"


@pytest.mark.parametrize("command", ["check", "plan"])
@pytest.mark.parametrize("form", ["-v", "--json"])
def test_no_terminal_obeys_what_files_say(
    folder: Path, call: Call, command: str, form: str
) -> None:
    (folder / f"{OBEYED}.csv").write_bytes((folder / "active.csv").read_bytes())
    own = folder / "obeyed.yaml"
    settings = yaml.safe_load((folder / "active.yaml").read_text())
    settings["data"]["source"]["path"] = f"{OBEYED}.csv"
    own.write_text(yaml.safe_dump(settings))
    done = call("active", command, own, form)
    assert done.exit_code == 0
    assert "a\\" in done.out
    assert done.out.replace("\n", "").isprintable()
    if form == "--json":
        assert json.dumps(f"{OBEYED}.csv")[1:] in json.dumps(done.json())


def test_a_notebook_shows_names_as_they_are() -> None:
    page = as_html(OBEYED, [{OBEYED: OBEYED}], OBEYED)
    assert page.count(r"a\x1b[2J\x9b\u202e") == 4
    assert page.isprintable()


@pytest.mark.parametrize(
    ("party", "figures", "then"),
    [
        (
            "active",
            [
                "data: 380 rows in",
                ", 2 feature columns (own1, own2), about 4 steps of 64 rows per epoch; ",
                "; the top model fits",
                "labels: 2 classes, 30.53% positive",
                "device: cpu",
                "defense: none",
                "bound on the leak AUC of the whole run: none",
            ],
            "splitveil plan ",
        ),
        ("passive", ["data: 380 rows in", "device: cpu", "the bottom model fits"], "--connect, "),
    ],
)
def test_check_takes_ten_lines_unless_details_are_asked_for(
    party: str, figures: list[str], then: str, folder: Path, call: Call
) -> None:
    words = (party, "check", folder / f"{party}.yaml", "--set", "device=cpu")
    lines = call(*words).out.splitlines()
    assert len(lines) <= 10
    assert [figure for figure in figures if not any(figure in line for line in lines)] == []
    assert lines[-1].startswith("next: splitveil ")
    assert then in lines[-1]
    details = call(*words, "-v").out
    assert "  learning_rate: " in details
    assert set(details.splitlines()) > set(lines[:-2])
    assert call(*words, "-q").out == ""


def test_check_prints_every_problem_after_the_resolved_settings(folder: Path, call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        wrong = (f"listen={listen}", "device=cuda:98", "data.source.path=nowhere.csv")
        sets = [word for one in wrong for word in ("--set", one)]
        done = call("active", "check", folder / "active.yaml", "-v", *sets)
    said = done.out + done.err
    assert done.exit_code == 2
    for text in (
        "alignment_attempts: 3\n",
        f"listen: cannot serve at {listen}: ",
        "device: cuda:98 needs a GPU, and torch",
        "nowhere.csv: there is no such file",
    ):
        assert text in said
    said = call("passive", "check", folder / "passive.yaml", "-v").out
    assert "deadline_s: 300.0\n" in said
    assert "ok: connect: no active party answers at 127.0.0.1:1 now" in said


@pytest.mark.parametrize(
    ("batches", "code", "said"),
    [
        ("batch_size=999", 0, "WARNING: contract.batch_size: 999 is more than the 228 rows to tr"),
        ("drop_last=true", 0, "about 3 steps of 64 rows"),
        ("batch_size=999 drop_last=true", 2, "contract.batch_size: 999 is more than the 228 rows"),
    ],
)
def test_check_says_where_rows_fill_no_batch(
    batches: str, code: int, said: str, folder: Path, call: Call
) -> None:
    sets = [word for one in batches.split() for word in ("--set", f"contract.{one}")]
    for party in ("active", "passive"):
        done = call(party, "check", folder / f"{party}.yaml", *sets)
        assert said in done.out + done.err
        assert done.exit_code == code


@pytest.mark.parametrize(
    ("defense", "bounds", "verdict"),
    [
        ("{name: none}", ["none"] * 3, "Nothing limits what a run with none reveals"),
        (
            "{name: marvell, noise: persistent}",
            ["none", "0.717", "0.717"],
            "follows the protocol, all 2 epochs",
        ),
        ("{name: marvell}", ["none", "none", "likely"], "no promise, and only a run_budg"),
        ("{name: noisy_label}", ["0.639"] * 3, "does whatever it likes, all 2 ep"),
    ],
)
def test_a_plan_answers_one_question_in_a_table_and_a_sentence(
    defense: str, bounds: list[str], verdict: str, folder: Path, call: Call
) -> None:
    words = ("active", "plan", folder / "active.yaml", "--set", f"defense={defense}")
    done = call(*words)
    question, *table, sentence = done.out.splitlines()
    assert done.err.endswith(f" next: splitveil run {folder / 'active.yaml'}\n")
    assert question.endswith(" reveal about the labels, and to whom?")
    rows = [line.split("│")[1:3] for line in table if "│" in line]
    assert [bound.split()[0] for _, bound in rows] == bounds
    assert verdict in sentence
    details = call(*words, "-v").out
    assert question in details
    assert "sum_kl" in details
    assert "sum_kl" not in "".join(table)


def test_a_plan_refuses_a_budget_that_the_first_answer_exceeds(folder: Path, call: Call) -> None:
    released = ("--set", "defense={name: noisy_label}", "--set")  # a leak AUC of .639
    words = ("active", "plan", folder / "active.yaml", *released)
    done = call(*words, "run_budget={leak_auc: 0.6}")
    assert done.exit_code == 2
    assert "the run ends in epoch 1 of 2" in done.out
    assert "run_budget: the first answer exceeds it, so that the run would end" in done.err
    assert "next: " not in done.err
    assert call(*words, "run_budget={leak_auc: 0.64}").exit_code == 0


def test_a_plan_is_printed_as_json(folder: Path, call: Call) -> None:
    words = ("active", "plan", folder / "active.yaml", "--set", "defense={name: noisy_label}")
    found = call(*words, "--json", "--target-leak-auc", "0.65").json()
    assert found["defense"] == "noisy_label"
    assert [one["bound_anybody"] for one in found["answers"]] == pytest.approx(
        [0.638163, 0.638163], abs=1e-6
    )
    assert found["target"]["leak_auc"] == 0.65
    assert "0.639" in call(*words).out
    own = ("--set", f"runs_dir={folder / 'planned'}")
    wrong = call(*words, *own, "--target-leak-auc", "1.5")
    assert (wrong.exit_code, wrong.out) == (2, "")
    assert "--target-leak-auc: expected an AUC between 0.5 and 1, got 1.5" in wrong.err
    call(*words, *own)
    assert not (folder / "planned").exists()


def test_a_report_says_where_it_is(folder: Path, call: Call) -> None:
    words = ("active", "report")
    run = folder / "runs" / "small-none-seed-0"
    found = call(*words, run, "--json", "--output", folder / "page.html").json()
    assert found == {"report": str(folder / "page.html")}
    assert "<html" in (folder / "page.html").read_text()
    done = call(*words, folder / "runs" / "small-non-seed-0")
    assert done.exit_code == 2
    assert f"in {folder / 'runs'}; did you mean 'small-none-seed-0'?" in done.err


def test_certificates_are_shown_as_json(tmp_path: Path, call: Call) -> None:
    made = call("certs", "init", tmp_path / "certificates", "--json").json()
    assert sorted(made) == ["active", "passive"]
    file = tmp_path / "certificates" / "active" / "certificate.pem"
    shown = call("certs", "show", file, "--json").json()
    assert shown == made["active"]
    assert shown["identities"] == ["active.splitveil"]
    assert shown["days_left"] in {89, 90}
    assert shown["sha256"] in call("certs", "show", file).out.replace(" ", "")
    again = ("certs", "renew", tmp_path / "certificates", "--party", "active", "--json")
    assert call(*again).json()["active"]["sha256"] != shown["sha256"]


def test_a_transcript_is_verified_as_json(call: Call, tmp_path: Path) -> None:
    for party in ("active", "passive"):
        (tmp_path / party).mkdir()
        with Transcript(tmp_path / party, party):
            pass  # a process that has started and ended
    files = [tmp_path / party / "transcript.jsonl" for party in ("active", "passive")]
    found = call("active", "verify-transcript", files[0], "--against", files[1], "--json").json()
    assert [one["entries"] for one in found["transcripts"]] == [1, 1]
    assert found["compared"] == {"agreed": 0, "lost": {}, "unsent": {}}


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)
    labels = np.arange(200) % 2
    rows = (labels[:, None] - 0.5) + draw.normal(size=(200, 4))
    path = tmp_path_factory.mktemp("gradients") / "sent.npz"
    np.savez(path, gradients=rows, labels=labels, covariates=draw.normal(size=(200, 2)))
    return path


def test_gradients_of_another_trainer_are_audited(gradients: Path, call: Call) -> None:
    found = call("audit", gradients, "--batch-size", 50, "--json").json()
    assert found["rows"] == 200
    by_attack = {one["attack"]: one for one in found["batches"]}
    assert by_attack["lda"]["leak_auc"] > 0.8 > by_attack["norm"]["leak_auc"]
    assert {one["batches"] for one in found["batches"]} == {4}
    assert found["adjusted"]
    twice = call("audit", gradients, gradients, "--batch-size", 160, "--json").json()
    assert {one["batches"] for one in twice["batches"]} == {4}  # none with rows of both files
    text = call("audit", gradients, "--attacks", "lda", "norm").out
    assert "Audit of 200 rows" in text
    assert "lda" in text
    assert "cosine" not in text


def test_what_a_party_stored_of_a_run_is_audited(tmp_path: Path, call: Call) -> None:
    """Its rows of all epochs, which only their owner may read; without the setting, none."""
    record(tmp_path)
    assert not list(tmp_path.glob("passive/received*"))
    record(tmp_path, passive=["adversary.store_received=true"])
    files = sorted(tmp_path.glob("passive/received*"))
    assert [file.name for file in files] == ["received-0001.npz", "received-0002.npz"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    found = call("audit", *files, "--attacks", "exploit", "cosine", "--json").json()
    (searched,) = found["run"]
    assert (searched["attack"], searched["examples"]) == ("exploit", found["rows"] / 2)
    assert searched["auc"] > 0.95


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "expected an array labels"),
        ({"labels": [0, 1, 2]}, "gradients: expected 3 rows"),
        ({"labels": [0, 1], "batches": [0, 0]}, "leave --batch-size out"),
    ],
)
def test_arrays_that_cannot_be_audited_are_refused(
    arrays: dict[str, Any], message: str, tmp_path: Path, call: Call
) -> None:
    np.savez(tmp_path / "sent.npz", gradients=np.zeros((2, 2)), **arrays)
    done = call("audit", tmp_path / "sent.npz", "--batch-size", "1")
    assert done.exit_code in {2, 3}
    assert (done.out, done.err.count("splitveil audit: "), done.err.count("\n")) == ("", 1, 1)
    assert message in done.err


def npy_of(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def npy_header(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    return npy_of(str({"descr": descr, "fortran_order": False, "shape": shape}).encode())


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("the pickle was loaded",))


def pickled() -> bytes:
    data = io.BytesIO()
    np.save(data, np.array([Bomb(), Bomb()], dtype=object))
    return data.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(npy_header((2**40,)), id="7 TiB"),
        pytest.param(npy_header((2**20,)), id="8 MiB"),
        pytest.param(npy_header((10**18,), "|V0"), id="10^18 rows of nothing"),
        pytest.param(npy_header((10**18,), "<U0"), id="10^18 rows of no text"),
        pytest.param(npy_header((0, 10**12)), id="10^12 columns of no row"),
        pytest.param(npy_header((10**12, 0)), id="10^12 rows of no column"),
        pytest.param(npy_header((-50,)), id="a negative shape"),
        pytest.param(npy_of(b"{" * 9000), id="no Python"),
        pytest.param(npy_of(b"-" * 9000 + b"1"), id="signs"),
        pytest.param(npy_of(b"exit()"), id="a call"),
        pytest.param(npy_of(b" " * 60_000), id="too long"),
        pytest.param(pickled(), id="pickled"),
        pytest.param(b"", id="empty"),
    ],
)
@pytest.mark.parametrize("name", ["gradients", "labels"])
def test_arrays_that_claim_too_much_are_refused_in_one_line(
    content: bytes, name: str, tmp_path: Path, call: Call
) -> None:
    with zipfile.ZipFile(tmp_path / "sent.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for one in ("gradients", "labels"):
            archive.writestr(f"{one}.npy", content if one == name else npy_header((0,)))
    done = call("audit", tmp_path / "sent.npz")
    assert (done.exit_code, done.out, done.err.count("\n")) == (3, "", 1)
    assert "expected an npz archive of arrays of numbers" in done.err


@pytest.mark.parametrize(
    "content", [b"", b"no archive", npy_header((0,)), b"PK\x03\x04" + bytes(99)]
)
def test_a_file_of_gradients_that_is_no_archive_is_refused(
    content: bytes, tmp_path: Path, call: Call
) -> None:
    (tmp_path / "sent.npz").write_bytes(content)
    done = call("audit", tmp_path / "sent.npz")
    assert (done.exit_code, done.err.count("\n")) == (3, 1)
    (tmp_path / "sent.npz").unlink()
    os.mkfifo(tmp_path / "sent.npz")
    assert "not a regular file" in call("audit", tmp_path / "sent.npz").err


def test_a_schema_is_printed(call: Call) -> None:
    for kind, schema in call("schema").json().items():
        assert schema["title"] == f"splitveil: {kind}.yaml"
        assert call("schema", kind).json() == schema
