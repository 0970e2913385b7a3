"""``splitveil init`` finds out what a table's columns are, and writes settings that can be used."""

import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from splitveil.active_party.settings import ActiveSettings
from splitveil.command.program import main as splitveil
from splitveil.common.data.table import read_table
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.contract import LearningRateSchedule
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.columns import Column, describe
from splitveil.deploy.init.initialise import Written, initialise
from splitveil.deploy.init.proposal import Terms, recommended_sizes
from tests.support import simulation
from tests.support.commands import exit_code_of

ROWS = 600


def draw() -> np.random.Generator:
    return np.random.default_rng(3)


def write(path: Path, columns: Mapping[str, Sequence[object]], delimiter: str = ",") -> Path:
    lines = [delimiter.join(columns)]
    lines += [delimiter.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def clients(folder: Path, **others: Sequence[object]) -> Path:
    made = draw()
    columns: dict[str, Sequence[object]] = {
        "client": [f"c{i:05d}" for i in made.permutation(ROWS)],
        "churned": ["yes" if i % 5 == 0 else "no" for i in range(ROWS)],
        "fee": [f"{x:.2f}" for x in made.random(ROWS)],
        "plan": ["NA" if i % 7 == 0 else "SML"[i % 3] for i in range(ROWS)],
    }
    return write(folder / "clients.csv", columns | others, ";")


def usage(folder: Path, **others: Sequence[object]) -> Path:
    made = draw()
    columns: dict[str, Sequence[object]] = {
        "id": [f"c{i:05d}" for i in made.permutation(ROWS)],
        "calls": [
            "" if i % 11 == 0 else int(x) for i, x in enumerate(made.integers(90, size=ROWS))
        ],
        "region": ["NESW"[i % 4] for i in range(ROWS)],
    }
    return write(folder / "usage.csv", columns | others)


def active(folder: Path, path: Path, wishes: Wishes | None = None) -> Written:
    return initialise(path, wishes or Wishes(), Terms("active", folder))


def passive(folder: Path, path: Path, wishes: Wishes | None = None) -> Written:
    return initialise(path, wishes or Wishes(), Terms("passive", folder))


def one(cells: Sequence[object], name: str = "x") -> Column:
    return describe(name, pa.chunked_array([pa.array(cells)]))


def test_codes_are_no_quantities() -> None:
    made = draw()
    channels = made.choice(made.permutation(500)[:160], size=4000)
    assert one([str(x) for x in channels]).looks_like_codes
    ages = made.integers(18, 90, size=4000)
    assert not one([str(x) for x in ages]).looks_like_codes
    limits = made.integers(1, 80, size=4000) * 10_000
    assert not one([str(x) for x in limits]).looks_like_codes
    counts = np.floor(made.exponential(30, size=4000)).astype(int)
    counts[made.random(4000) < 0.6] = 0
    assert not one([str(x) for x in counts]).looks_like_codes
    assert not one([str(x) for x in ages], "device_id").looks_like_codes


def test_what_is_written_can_be_used_as_it_is(tmp_path: Path) -> None:
    since = ["2026-01-31", "", "2026-02-01"] * (ROWS // 3)
    active(tmp_path, clients(tmp_path, since=since))
    written = (tmp_path / "active.yaml").read_text()
    assert "- fee  # numbers, " in written
    assert "- plan  # texts, 3 distinct; 86 gaps ('NA')" in written
    assert "# 20.0% of the labels are positive ('yes'); 1 other text (480 rows) st" in written
    assert stat.S_IMODE((tmp_path / "active.yaml").stat().st_mode) == 0o600
    passive(tmp_path, usage(tmp_path), Wishes(has_id=False))
    assert yaml.safe_load((tmp_path / "passive.yaml").read_text())["data"].get("id_column") is None
    initialise(usage(tmp_path), Wishes(), Terms("passive", tmp_path), force=True)
    run = simulation.build(simulation.read_settings(tmp_path, ["refit.epochs=2"]))
    assert run.active.settings.data.positive_label == "yes"
    assert run.active.settings.contract.is_one_shot
    assert run.active.settings.defense.name == "none"
    models = run.active.settings.top_model, run.passive["passive"].settings.bottom_model
    assert [model.kind for model in models] == ["tabular", "pca"]
    assert run.active.settings.optimizer.kind == "adamw"
    schedule = run.active.settings.contract.schedule
    assert (schedule.warmup_steps, schedule.decay) == (4, "cosine")  # of 20 epochs with 4 steps
    run.meet()
    run.fit_top()
    assert run.active.seen.evaluations[-1].figures.auc is not None


def test_the_label_that_the_label_owner_s_settings_name_is_no_feature_unless_it_is_named(
    tmp_path: Path,
) -> None:
    active(tmp_path, clients(tmp_path))
    table = usage(tmp_path, churned=["yes" if i % 5 == 0 else "no" for i in range(ROWS)])
    left_out = passive(tmp_path, table).proposal.choices.left_out
    assert left_out == {"churned": "the label owner's label, as active.yaml says"}
    wishes, terms = Wishes(categorical=("churned",)), Terms("passive", tmp_path)
    chosen = initialise(table, wishes, terms, force=True).proposal.choices
    assert "churned" in [column.name for column in chosen.categorical]
    assert chosen.left_out == {}


def test_the_contract_gets_the_width_that_the_columns_allow_and_never_a_wider_one(
    tmp_path: Path,
) -> None:
    contract = tmp_path / "contract.yaml"
    active(tmp_path, clients(tmp_path))
    before = yaml.safe_load(contract.read_text())
    said = passive(tmp_path, usage(tmp_path)).width
    after = yaml.safe_load(contract.read_text())
    (width,) = after.pop("cut_shape")
    assert before.pop("cut_shape") == [64]
    assert after == before
    assert f"cut_shape: [{width}], which gives away" in said
    assert said.endswith(", in the place of [64]")
    limit = yaml.safe_load((tmp_path / "passive.yaml").read_text())["max_exposure"]
    assert 0.5 <= limit <= 1
    for chosen in ("cut_shape: [1]", "cut_shape:\n  - 64"):  # by a person
        written = contract.read_text().replace(f"cut_shape: [{width}]", chosen)
        contract.write_text(written)
        said = initialise(usage(tmp_path), Wishes(), Terms("passive", tmp_path), force=True).width
        assert contract.read_text() == written
        assert said.startswith("contract.yaml" if "1" in chosen else "expected in contract.yaml")
        contract.write_text(written.replace(chosen, f"cut_shape: [{width}]"))


@pytest.mark.parametrize("total", [8, 20, 100])
def test_learning_rates_reach_their_full_value_with_few_common_rows(total: int) -> None:
    """The steps for warming up follow the label owner's rows, which may be many more."""
    schedule = LearningRateSchedule(warmup_steps=39, decay="cosine")
    factors = [schedule.factor(step, total) for step in range(total)]
    assert max(factors) == 1
    assert factors[-1] < 0.2


def test_sizes_follow_the_rows() -> None:
    rows = (300, 1_000, 9_000, 36_000, 80_000)
    sizes = [recommended_sizes(number) for number in rows]
    assert [(one.batch_size, one.epochs, one.warmup_steps) for one in sizes] == [
        (32, 20, 8),
        (128, 20, 7),
        (256, 20, 29),
        (1024, 20, 29),
        (1024, 10, 31),
    ]
    assert [one.max_set_size for one in sizes] == [*rows]
    assert recommended_sizes(1_234_567).max_set_size == 1_300_000
    assert recommended_sizes(1_234_567, is_exact=False).max_set_size == 1_400_000


def test_the_larger_table_sets_the_limit_on_ids(tmp_path: Path) -> None:
    active(tmp_path, clients(tmp_path))
    contract = tmp_path / "contract.yaml"
    assert f"\n  max_set_size: {ROWS}  # most ids" in contract.read_text(encoding="utf-8")
    assert passive(tmp_path, usage(tmp_path)).lists == ""
    rows = ["customer,calls", *(f"K{i},{i % 7}" for i in range(2 * ROWS))]
    (tmp_path / "more.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    terms = Terms("passive", tmp_path)
    found = initialise(tmp_path / "more.csv", Wishes(), terms, force=True)
    assert found.lists == f"contract.yaml: max_set_size: {2 * ROWS}, for the rows of this table"
    read = yaml.safe_load(contract.read_text(encoding="utf-8"))
    assert read["alignment"] == {"min_aligned": 100, "max_set_size": 2 * ROWS}


def test_every_column_is_found_out(tmp_path: Path) -> None:
    found = active(
        tmp_path,
        clients(
            tmp_path,
            since=["2026-01-01"] * 300 + ["2026-03-01"] * 300,
            until=["1.1.2026"] * 300 + ["1.3.2026"] * 300,
            note=[f"text {i} of its own" for i in range(ROWS)],
            cancelled_on=["x" if i % 5 == 0 else "" for i in range(ROWS)],
            fold=["train" if i % 3 else "test" for i in range(ROWS)],
            all_the_same=["a"] * ROWS,
            nothing=["", "NA"] * (ROWS // 2),
            grade=["?AB"[i % 3] for i in range(ROWS)],
        ),
    ).proposal
    choices = found.choices
    assert choices.id_column == "client"
    assert choices.label is not None
    assert (choices.label.column, choices.label.positive_setting) == ("churned", "yes")
    assert choices.label.rarest_share == pytest.approx(0.2)
    assert [column.name for column in choices.numeric] == ["fee"]
    gaps = {column.name: column.gaps for column in choices.categorical}
    assert gaps == {"plan": ("NA",), "grade": ("?",)}
    left_out = dict(choices.left_out)
    assert [column.name for column in choices.timestamps] == ["since"]
    assert "timestamp_format" in left_out["until"]
    assert set(left_out) == {"until", "note", "cancelled_on", "fold", "all_the_same", "nothing"}
    assert left_out["nothing"] == "no values"
    assert "gives the label away" in left_out["cancelled_on"]
    assert choices.split_column == "fold"
    assert found.source == {"kind": "csv", "delimiter": ";"}


def test_columns_that_may_be_the_label_are_listed(tmp_path: Path) -> None:
    path = clients(tmp_path, y=[i % 3 for i in range(ROWS)], z=["abc"[i % 3] for i in range(ROWS)])
    with pytest.raises(SettingsError, match="columns that may be it: churned, y"):
        active(tmp_path, path)


def test_a_label_that_only_its_two_values_speak_for_is_called_a_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "smokers.csv"
    rows = "".join(f"c{i},{20 + i % 50},{'yes' if i % 3 else 'no'}\n" for i in range(ROWS))
    path.write_text("client,age,smoker\n" + rows)
    written = tmp_path / "active.yaml"
    for chosen in ([], ["--label-column", "smoker"]):
        words = ["active", path, "--folder", tmp_path, "--force", *chosen]
        assert command(*words) == 0
        said = capsys.readouterr().out
        assert ("a guess" in said) == ("--label-column names another" in said) == (not chosen)
        assert ("label_column: smoker  # never a feature; a guess" in written.read_text()) == (
            not chosen
        )
        assert command(*words, "--json") == 0
        assert json.loads(capsys.readouterr().out)["label_column_is_guessed"] == (not chosen)


def test_a_question_that_is_left_open_is_not_guessed(tmp_path: Path) -> None:
    path = clients(tmp_path, card_id=[f"k{i}" for i in range(ROWS)])
    with pytest.raises(SettingsError, match=r"--id-column: .*client, card_id"):
        active(tmp_path, path)
    found = active(tmp_path, path, Wishes(id_column="card_id"))
    assert dict(found.proposal.choices.left_out)["client"].startswith("texts of which most rows")


def test_parquet_is_read_in_its_own_types(tmp_path: Path) -> None:
    when = np.arange(ROWS).astype("datetime64[D]")
    table = pa.table({"id": range(ROWS), "when": when, "amount": draw().random(ROWS)})
    (tmp_path / "parts").mkdir()
    parquet.write_table(table, tmp_path / "one.parquet")
    for number, part in enumerate((table[:100], table[100:])):
        parquet.write_table(part, tmp_path / "parts" / f"{number}.parquet")
    for name in ("one.parquet", "parts"):
        path = tmp_path / name
        found = initialise(path, Wishes(), Terms("passive", tmp_path), force=True).proposal
        assert (found.source, found.num_rows) == ({"kind": "parquet"}, ROWS)
        assert [column.name for column in found.choices.numeric] == ["amount"]
        assert [column.name for column in found.choices.timestamps] == ["when"]


NAMES = (
    *("a b", 'quo"te', "y", "#no", "ünï", "- x", "{{ p }}"),
    *("a\x85b", "a\nb", "a\u2028b", "a\x1bb", "\ufeffa", "\U0001f600"),
)


def test_any_name_of_a_column_and_any_label_is_written_as_it_is(tmp_path: Path) -> None:
    classes = NAMES[-6:-2]
    labels = [f'"{classes[i % 4]}"' for i in range(ROWS)]
    columns: dict[str, Sequence[object]] = {"id": range(ROWS), "label": labels}
    quoted = ['"' + name.replace('"', '""') + '"' for name in NAMES]
    columns |= {name: [i / 7 for i in range(ROWS)] for name in quoted}
    table = write(tmp_path / "t.csv", columns)
    active(tmp_path, table, Wishes(id_column="id", label_column="label"))
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml")
    assert settings.data.class_names == tuple(sorted(classes))
    assert settings.data.features is not None
    assert set(settings.data.features.numeric) == {*NAMES}
    assert len(read_table(settings.data, tmp_path)) == ROWS


def test_what_settings_cannot_hold_is_left_out_or_refused_before_a_file_is_written(
    tmp_path: Path,
) -> None:
    labels = ["c" if i % 3 else "a\0b" for i in range(ROWS)]
    table = usage(tmp_path, **{"a\0b": range(ROWS), "y": labels})
    found = passive(tmp_path, table, Wishes(exclude=("y",)))
    assert ("a\0b", "its name has a NUL character, which settings cannot hold") in (
        found.proposal.choices.left_out.items()
    )
    for wishes in (Wishes(label_column="y"), Wishes(id_column="a\0b", label_column="region")):
        with pytest.raises(SettingsError, match=r"'a\\x00b': settings cannot hold a NUL"):
            active(tmp_path, table, wishes)
    assert not (tmp_path / "active.yaml").exists()


@pytest.mark.parametrize("name", ["a${HOME}$b.csv", "~nobody.csv", "a\x85b.csv"])
def test_any_name_of_a_file_is_written_as_it_is(tmp_path: Path, name: str) -> None:
    active(tmp_path, clients(tmp_path).rename(tmp_path / name))
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml")
    assert len(read_table(settings.data, tmp_path)) == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("a,a\n1,2\n", "a name of its own for every"),
        ("a,b\n", "no rows"),
    ],
)
def test_a_file_without_a_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        passive(tmp_path, tmp_path / "t.csv")


def command(*words: object) -> int:
    return exit_code_of(splitveil, "init", *words)


def test_nothing_is_overwritten_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = clients(tmp_path)
    (tmp_path / "contract.yaml").write_text("agreed: long ago\n")
    assert command("active", path, "--folder", tmp_path) == 2
    assert "will not be overwritten without --force" in capsys.readouterr().err
    assert not (tmp_path / "active.yaml").exists()
    assert (tmp_path / "contract.yaml").read_text() == "agreed: long ago\n"
    assert command("active", path, "--folder", tmp_path, "--force") == 0
    assert "run_name: clients" in (tmp_path / "contract.yaml").read_text()


@pytest.mark.parametrize(("written", "warns"), [("0{}", True), ("c{}", False)])
def test_doubtful_forms_of_ids_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, *, warns: bool
) -> None:
    path = usage(tmp_path, id=[written.format(number) for number in range(ROWS)])
    assert command("passive", path, "--folder", tmp_path, "--id-column", "id") == 0
    said = capsys.readouterr().out
    assert (f"{ROWS} ids of digits begin with 0, but" in said) == ("warning" in said) == warns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--id-column", "idd"], "there is no column 'idd'; did you mean 'id'?"),
        (["--id-column", "region"], "each once, found texts, 4 distinct"),
        (["--label-column", "region"], "only the active party has labels"),
        (["--address", "nowhere"], "expected HOST:PORT"),
        (["--party", "../x"], "expected letters"),
        (["--exclude", "calls", "region"], "no column is left for the model"),
    ],
)
def test_answers_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert command("passive", usage(tmp_path), "--folder", tmp_path, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "passive.yaml").exists()
