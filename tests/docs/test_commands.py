"""The commands and settings in README and guide work: they are run, or at least parsed, here.

The settings files of the guide's own-data page are taken from the page, with small tables made to
fit, and its commands are run on them in order. The options and settings of every other command of
these pages are parsed.
"""

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from splitveil import Run
from splitveil.active_party.settings import ActiveSettings
from splitveil.command import program as splitveil
from splitveil.command.program import OF_ONE_PARTY, SUB_COMMANDS
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.common.run.contract import Contract
from splitveil.common.settings import validate
from splitveil.deploy import overrides
from splitveil.deploy.demo import DEMO
from splitveil.passive_party.settings import PassiveSettings
from tests.support.commands import Done, begun, called, ended, write_tables
from tests.support.markdown import GUIDE, ROOT, Block, blocks, name_of, prose
from tests.support.simulation import free_address

OWN_DATA = ROOT / "docs" / "guide" / "own-data.md"
SETTINGS_PAGES = [*GUIDE, ROOT / "docs" / "defenses.md"]
EXAMPLES = ROOT / "deploy" / "examples"
INLINE = re.compile(r"`((?:splitveil|python -m) [^`]+)`")
SHORT = ("--set", "contract.epochs=1", "--set", "contract.batch_size=64")

VERIFY = (
    "splitveil verify-transcript runs/NAME/active/transcript.jsonl "
    "--against runs/NAME/passive/transcript.jsonl"
)
RUN_HERE = (
    "splitveil certs init certificates",
    "splitveil check active.yaml",
    "splitveil check passive.yaml",
    "splitveil align active.yaml --positions --output clients-positions.parquet",
    "splitveil align passive.yaml --positions --output usage-positions.parquet",
    "splitveil plan active.yaml --target-leak-auc 0.65",
    "splitveil run active.yaml",
    "splitveil run passive.yaml",
    "splitveil report runs/NAME",
    "splitveil report runs/NAME --target-leak-auc 0.6",
    "splitveil report runs/NAME runs/OTHER --output comparison.html",
    "splitveil report runs/NAME/passive",
    VERIFY,
    "splitveil certs renew certificates --party active",
    "splitveil certs show certificates/active/certificate.pem",
    "python -m splitveil.experiments list",
)
"""In the order in which a reader types them; a run's two parties at the same time."""


def typed(page: Path) -> Iterator[str]:
    for block in blocks(page):
        for line in block.lines if block.language == "sh" else ():
            yield " ".join(shlex.split(line, comments=True))


TYPED = sorted({text for page in GUIDE for text in typed(page) if text})
MENTIONED = sorted(
    {text for page in GUIDE for line in prose(page) for text in INLINE.findall(line)}
)


def settings_block(name: str) -> Block:
    found = [block for block in blocks(OWN_DATA) if block.text.startswith(f"# {name}:")]
    assert len(found) == 1, name
    return found[0]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the page's settings files and tables that fit them."""
    folder = tmp_path_factory.mktemp("own")
    write_tables(folder)
    for name in ("contract.yaml", "active.yaml", "passive.yaml"):
        (folder / name).write_text(settings_block(name).text, encoding="utf-8")
    return folder


def both_run(folder: Path, *texts: str) -> dict[str, Done]:
    address = free_address()
    processes = {
        text: f"{where}={address}" for text, where in zip(texts, ("listen", "connect"), strict=True)
    }
    started = {
        text: begun(folder, text, "--set", where, *SHORT) for text, where in processes.items()
    }
    return {text: ended(process) for text, process in started.items()}


@pytest.fixture(scope="module")
def done(own: Path) -> Mapping[str, Done]:
    results: dict[str, Done] = {}
    for place, text in enumerate(RUN_HERE):
        if text in results:
            continue
        if " run " in text or " align " in text:
            results |= both_run(own, *RUN_HERE[place : place + 2])
        else:
            run_name = yaml.safe_load(settings_block("contract.yaml").text)["run_name"]
            typed = text.replace("runs/OTHER", "runs/NAME").replace("NAME/", f"{run_name}/")
            typed = typed.replace("runs/NAME", f"runs/{run_name}")
            results[text] = called(own, typed)
    return results


def test_the_commands_end_well_on_tables_of_one_s_own(done: Mapping[str, Done]) -> None:
    assert list(done) == [*RUN_HERE]
    assert {text: one.output for text, one in done.items() if one.exit_code != 0} == {}
    for party, table in (("active", "clients"), ("passive", "usage")):
        said = done[f"splitveil check {party}.yaml"].output
        assert f"ok: data: 1,400 rows in {table}.csv" in said


def test_the_run_leaves_the_files_that_the_guide_names(own: Path, done: Mapping[str, Done]) -> None:
    (folder,) = (own / "runs").glob("*/active")
    names = {path.name for path in folder.iterdir()}
    assert {"summary.json", "metrics.jsonl", "settings.yaml", "transcript.jsonl"} <= names
    assert {"report.html", "checkpoint"} <= names
    assert (folder / "checkpoint" / "ledger.safetensors").is_file()
    # The feature owner's ids have a leading blank, and are in another order.
    summaries = [json.loads(path.read_text()) for path in (own / "runs").glob("*/*/summary.json")]
    assert [summary["aligned_rows"] for summary in summaries] == [1200, 1200]


def test_other_engines_join_the_positions_as_the_page_says(
    own: Path, done: Mapping[str, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert done
    monkeypatch.chdir(own)
    (recipe,) = (block.text for block in blocks(OWN_DATA) if block.language == "sql")
    duckdb.sql(recipe)
    (in_polars,) = re.findall(r"`(pl\.scan_csv.*)`\.", OWN_DATA.read_text(encoding="utf-8"))
    eval(in_polars, {"pl": pytest.importorskip("polars")})  # noqa: S307 (the page's own)
    usage = parquet.read_table("usage-positions.parquet")
    expected = [one.strip() for one in usage.sort_by("position")["customer"].to_pylist()]
    shards = [parquet.read_table(f"clients-shards/shard={shard}") for shard in range(4)]
    assert [shard.num_rows for shard in shards] == [300] * 4
    for table in (pa.concat_tables(shards), parquet.read_table("clients-aligned.parquet")):
        assert table["client_id"].to_pylist() == expected
        assert table["position"].to_pylist() == list(range(1200))
        assert {"churned", "plan"} <= {*table.column_names}
    assert Path("usage-positions.parquet").stat().st_mode & 0o777 == 0o600


def test_the_pages_show_the_commands_that_are_run_here() -> None:
    assert {*RUN_HERE} - {*TYPED, *MENTIONED} == set()


@pytest.mark.parametrize("text", TYPED)
def test_every_command_can_be_parsed(text: str) -> None:
    program, *arguments = shlex.split(text)
    match program:
        case "splitveil":
            read_by_sub_command(arguments)
        case "python" if ".torchrun " in text:
            module, *words = shlex.split(text.rpartition("-m splitveil.")[2])
            read_by_sub_command([module.removesuffix("_party"), *words])
        case "docker":
            files = [one for one in arguments if one.endswith(".yml")] or ["docker-compose.yml"]
            assert all((ROOT / file).is_file() for file in files)
        case _:
            assert program in {"make", "pip", "python", "scp"}


def read_by_sub_command(arguments: Sequence[str]) -> None:
    """Read the arguments of ``splitveil`` as its sub-command does, and an example's settings."""
    if arguments[0].startswith("-"):
        with pytest.raises(SystemExit) as end:
            splitveil.main(arguments)
        assert end.value.code == 0
        return
    first, *words = arguments
    modules = {name: path for name, (_, path) in (SUB_COMMANDS | OF_ONE_PARTY).items()}
    if first in modules:
        options = import_module(modules[first]).parser(f"splitveil {first}").parse_args(words)
    else:
        options = splitveil._parser().parse_args(arguments)
    if first == "demo":
        options.example_dir = EXAMPLES / (options.example or DEMO)
    if first in {"demo", "local"}:
        accept(options)


@pytest.mark.parametrize("text", [text for text in MENTIONED if text.startswith("splitveil ")])
def test_what_a_sentence_mentions_is_in_the_help(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, *words = text.split()
    options = [word for word in words if word.startswith("--")]
    named = list(takewhile(str.isalpha, words))
    with pytest.raises(SystemExit) as end:
        splitveil.main([*named, "--help"])
    assert end.value.code == 0
    assert all(option in capsys.readouterr().out for option in options)


def accept(options: argparse.Namespace) -> None:
    """Read the example's settings with the options' overrides, as each party would."""
    folder = ROOT / options.example_dir
    named = overrides.Overrides(options.overrides)
    defenses = [overrides.parse_defense(text).settings for text in options.defense or []]
    for defense in defenses or [{"name": "none"}]:
        text = f"defense={yaml.safe_dump(defense, default_flow_style=True, width=10_000)}"
        load_party_settings(ActiveSettings, folder / "active.yaml", [*named.of("active"), text])
    for path in folder.glob("passive*.yaml"):
        load_party_settings(PassiveSettings, path, named.of(path.stem))


PROGRAMS = [page for page in GUIDE if any(one.language == "python" for one in blocks(page))]


PRINTED = {
    "README.md": r"one_shot",
    "docs/guide/python-api.md": (
        r"(?s)noisy_label.*\n0\.(6|59)\d*\ncomparison\.html\n0\.\d+\n.*clipped ratio=0\.5"
        r".*True 0\.\d+.*cut/largest.*'active\.pt2', 'passive\.pt2'.*nobody +False.*EpsilonBound"
        r".*\n(0\.[5-9]|1\.0)\d*\n.*power ratio.*0\.6"
    ),
    "docs/guide/tuning.md": r"'learning_rate': 0\.0.* 0\.9\d+ .*runs/trial-\d-seed-0",
    "docs/guide/predicting.md": "",  # tests/journeys/test_predict_processes.py calls its function
}
"""Page -> what its programs print, run one after the other in one interpreter."""


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")
@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_the_programs_of_a_page_run_as_they_stand(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if page.stem == "tuning":
        pytest.importorskip("optuna")
        pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            exec(compile(block.text, name_of(page), "exec"), names)  # noqa: S102 (the page's own)
    assert re.search(PRINTED[name_of(page)], capsys.readouterr().out)
    if page.stem == "tuning":
        assert_tracked(import_module("mlflow"))


def assert_tracked(mlflow: Any) -> None:
    client = mlflow.tracking.MlflowClient()
    stored = {run.info.run_name: run for run in client.search_runs(["0"])}
    assert {*stored} == {f"breast_cancer-{defense}-seed-0" for defense in ("none", "marvell")}
    for name, there in stored.items():
        run, run_id = Run(Path("runs") / name), there.info.run_id
        measured = [row["test_auc"] for row in run.rows("epochs")]
        assert [one.value for one in client.get_metric_history(run_id, "test_auc")] == measured
        assert there.data.params["defense"] == str(run.settings["defense"])


SNIPPETS = [
    pytest.param(block, id=f"{name_of(page)}: {block.lines[0]}")
    for page in SETTINGS_PAGES
    for block in blocks(page)
    if block.language == "yaml" and not block.lines[0].endswith((" both parties", "label owner"))
]


def laid_over(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings replaced by the settings of a snippet; ``data`` is only extended."""
    result = {**base, **more}
    if "data" in more:
        result["data"] = {**base["data"], **more["data"]}
        if "classes" in more["data"]:
            del result["data"]["positive_label"]
    return result


@pytest.mark.parametrize("block", SNIPPETS)
def test_every_piece_of_settings_is_accepted(own: Path, tmp_path: Path, block: Block) -> None:
    values = yaml.safe_load(block.text)
    if values.keys() <= Contract.model_fields.keys():
        contract = yaml.safe_load((own / "contract.yaml").read_text())
        validate(Contract, laid_over(contract, values), "contract")
        return
    kind = "active" if values.keys() <= ActiveSettings.model_fields.keys() else "passive"
    base = yaml.safe_load((own / f"{kind}.yaml").read_text())
    merged = {**laid_over(base, values), "contract": str(own / "contract.yaml")}
    (tmp_path / "party.yaml").write_text(yaml.safe_dump(merged))
    section: type[PartySettings] = ActiveSettings if kind == "active" else PassiveSettings
    is_of_gradients = values.get("defense", base.get("defense")) != base.get("defense")
    needs_gradients = is_of_gradients or values.keys() & {"adversary", "leak_monitor"}
    exchange = ["contract.exchange=gradients"] if needs_gradients else []
    load_party_settings(section, tmp_path / "party.yaml", exchange)
