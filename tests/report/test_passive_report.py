"""The passive party's report: what left, what it tells of features, and nothing of labels."""

import json
import re
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

from splitveil.common.data.features import FeatureEncoder, Features, NumericScaler, Vocabulary
from splitveil.common.errors import SettingsError
from splitveil.common.models.data_parallel import Learner
from splitveil.common.party.report_parts import Volume, read_traffic
from splitveil.common.privacy.figures import AttackFigure
from splitveil.common.record.run_record import (
    AlignmentLine,
    EpochLeakLine,
    LeakLine,
    RunCounts,
    Summary,
    write_summary,
)
from splitveil.common.record.transcript import Crossing, Transcript
from splitveil.passive_party.bottom_trainer import BottomTrainer
from splitveil.passive_party.commands.program import main
from splitveil.passive_party.commands.run import try_to_report
from splitveil.passive_party.feature_exposure import (
    ColumnExposure,
    FeatureExposure,
    Sample,
    exposure_from_json,
    exposure_to_json,
    measure_exposure,
)
from splitveil.passive_party.information_value import Bin, ColumnLoss, ColumnValue
from splitveil.passive_party.report_page import write_exposure, write_passive_report
from tests.support.commands import exit_code_of
from tests.support.records import append_lines

ROWS = 2000


class Chosen(nn.Module):
    """A bottom model that passes on the first number and the first category's embedding."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        table = torch.randn(levels + 2, width, generator=generator)
        self.table = nn.Parameter(table)

    def forward(self, features: Features) -> torch.Tensor:
        assert features.numeric is not None
        assert features.categorical is not None
        return torch.cat([features.numeric[:, :1], self.table[features.categorical[:, 0]]], dim=1)


def exposed(
    rows: int = ROWS,
    most_rows: int = ROWS,
    *,
    levels: int = 4,
    width: int = 6,
    most_frequent: float = 0.0,
    indicators: tuple[str, ...] = (),
    lists: tuple[Vocabulary, ...] = (),
    rows_with_gap: int | None = None,
) -> FeatureExposure | None:
    generator = torch.Generator().manual_seed(1)
    num_numbers = 2 + len(indicators) + sum(len(column.categories) + 1 for column in lists)
    slots = torch.randint(2, 2 + levels, (rows, 2), generator=generator)
    slots[torch.rand(rows, 2, generator=generator) < most_frequent] = 2
    features = Features(torch.randn(rows, num_numbers, generator=generator), slots)
    if rows_with_gap is not None and features.numeric is not None:
        features.numeric[:, 2] = (torch.arange(rows) < rows_with_gap).float()
    model = Chosen(levels, width)
    optimizer = SGD(model.parameters(), lr=0.1)
    learner = Learner(model, optimizer, ConstantLR(optimizer), torch.device("cpu"))
    trainer = BottomTrainer(learner, features)
    categories = tuple(map(str, range(levels)))
    encoder = FeatureEncoder(
        signed_log1p=False,
        numeric=tuple(NumericScaler(name=name, shift=0, scale=1) for name in ("sent", "kept")),
        categorical=tuple(
            Vocabulary(name=name, categories=categories) for name in ("shown", "hidden")
        ),
        image=None,
        indicators=indicators,
        lists=lists,
    )
    sample = Sample.draw(np.arange(rows), most_rows)
    return measure_exposure(trainer, encoder, 2 * rows, sample)


def test_columns_that_activations_carry_are_guessed_and_the_others_are_not() -> None:
    found = exposed()
    assert found is not None
    figures = {one.name: one for one in found.columns}
    assert {name for name, one in figures.items() if one.is_above_chance} == {"sent", "shown"}
    assert figures["sent"].right > 0.95
    assert figures["sent"].without == pytest.approx(0.25, abs=0.02)
    assert figures["shown"].right == figures["shown"].gain_fraction == 1
    assert figures["hidden"].without < 0.3
    assert (found.rows, found.known_rows, found.own_rows) == (1000, 1000, 2 * ROWS)
    assert found.dimensions == 7
    assert exposure_from_json(json.loads(json.dumps(exposure_to_json(found)))) == found
    assert exposure_from_json({"rows": "many"}) is exposure_from_json([]) is None


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("most_frequent", [0.0, 0.59])
def test_many_levels_that_activations_carry_are_guessed_however_few_values_carry_them(
    most_frequent: float, width: int
) -> None:
    found = exposed(levels=200, most_frequent=most_frequent, width=width)
    assert found is not None
    figures = {one.name: one for one in found.columns}
    assert figures["shown"].without == pytest.approx(max(most_frequent, 0.01), abs=0.02)
    assert figures["shown"].gain_fraction > 0.9
    assert not figures["hidden"].is_above_chance


def test_levels_that_are_too_rare_are_not_judged() -> None:
    found = exposed(levels=ROWS)
    assert found is not None
    assert found.unjudged == ("shown", "hidden")
    assert [one.name for one in found.columns] == ["sent", "kept"]


def test_gaps_and_lists_of_categories_are_named_and_a_list_counts_as_one_column() -> None:
    tags = Vocabulary(name="tags", categories=("x", "y"))
    found = exposed(indicators=("kept",), lists=(tags,))
    assert found is not None
    names = [one.name for one in found.columns]
    assert names == ["sent", "kept", "kept: gap", "tags", "shown", "hidden"]
    assert [one.name for one in found.columns if one.is_above_chance] == ["sent", "shown"]


@pytest.mark.parametrize("rows_with_gap", [0, 1, 2])
def test_a_gap_in_hardly_any_row_costs_no_other_column_its_figure(rows_with_gap: int) -> None:
    found = exposed(indicators=("kept",), rows_with_gap=rows_with_gap)
    assert found is not None
    assert [one.name for one in found.columns if one.is_above_chance] == ["sent", "shown"]


def test_a_sample_is_enough_and_too_few_rows_say_nothing() -> None:
    sampled = exposed(most_rows=300)
    assert sampled is not None
    assert sampled.rows == 300
    assert exposed(rows=49) is None


def test_noise_is_not_fitted() -> None:
    """With as many values as rows, a fit on the same rows would guess anything."""
    found = exposed(rows=300, width=250)
    assert found is not None
    assert {one.name for one in found.columns if one.is_above_chance} == {"sent", "shown"}


def write_run(
    folder: Path,
    *,
    leak: float = 0.9,
    security: str = "mtls",
    active: str = "labels.example.org",
    max_exposure: float | None = None,
) -> Path:
    """Write a passive party's files, with figures that depend on labels among them."""
    own = folder / "passive"
    own.mkdir(parents=True)
    figure = AttackFigure("cut", "norm", leak)
    append_lines(
        own,
        AlignmentLine(1234),
        LeakLine(0, 0, (figure,), leak / 2),
        EpochLeakLine(0, (figure,)),
    )
    write_summary(own, Summary(counts=RunCounts(1234, 1, 10), version="1.2.3"))
    contract = {
        "run_name": "joint",
        "cut_shape": [8],
        "cut_dtype": "float32",
        "identities": {"active": active},
        "alignment": {"min_aligned": 100, "max_set_size": 5000},
    }
    settings = {
        "contract": contract,
        "party": "passive",
        "bottom_model": {"kind": "mlp"},
        "security": {"mode": security},
        "adversary": {"labels": {"label_column": "bad"}},
        "alignment_attempts": 3,
        "max_exposure": max_exposure,
    }
    (own / "settings.yaml").write_text(yaml.safe_dump(settings))
    with Transcript(own, "passive") as transcript:
        transcript.note(Crossing("sent", "Train request", b"a" * 3000, 0, 0))
        transcript.note(Crossing("sent", "Train request", b"a" * 3000, 0, 1))
        transcript.note(Crossing("received", "Train reply", b"b" * 500, 0, 0))
    found = exposed()
    assert found is not None
    write_exposure(own, found)
    return folder


def test_the_page_says_what_left_to_whom_and_what_it_tells(tmp_path: Path) -> None:
    page = write_passive_report(write_run(tmp_path / "run")).read_text(encoding="utf-8")
    first, details = page.split("<details>")
    answer = (
        "A label owner that knows “shown” of 1,000 records guesses it correctly for 100 of 100 "
        "others with what was sent, and for 26 without."
    )
    assert answer in first
    assert "Columns can be guessed<" in first
    assert "Columns: 50 of 100</text>" in first
    assert "2 of 4 columns are guessed better than without" in first
    assert "knows which 1,234 of its ids we have too, and that we have 4,000." in first
    assert "5.86 KiB went to labels.example.org" in first
    assert "out of data.features in passive.yaml" in first
    at = [first.index(f'scope="row">{name}<') for name in ("shown", "sent", "kept")]
    assert at == sorted(at)
    assert len(re.findall(r"\w+", re.sub(r"<[^>]+>", " ", first.split("<body>")[1]))) <= 300
    sent = 'Train request: activations of training rows</td><td>sent</td><td class="number">2</td>'
    assert sent in details
    page = details
    assert "most ids per exchange (max_set_size)" in page
    assert "<td>5,000</td>" in page
    page = write_passive_report(write_run(tmp_path / "other", security="insecure")).read_text()
    assert "nobody was authenticated" in page
    assert "labels.example.org" not in page


def shown_in_rows(page: str) -> list[str]:
    """Return the names that a table's rows begin with."""
    return [unescape(name) for name in re.findall(r'<tr><th scope="row">(.*?)</th>', page)]


@pytest.mark.parametrize("release", ["noisy_labels", "noisy_sums"])
def test_what_columns_say_about_the_outcome_is_a_table_with_its_bins_in_the_details(
    tmp_path: Path, release: str
) -> None:
    run = write_run(tmp_path / "run")
    settings = yaml.safe_load((run / "passive" / "settings.yaml").read_text())
    settings["contract"] |= {"exchange": "one_shot", "release": release}
    (run / "passive" / "settings.yaml").write_text(yaml.safe_dump(settings))
    bins = (
        Bin("missing, from 18", 1500, 0.1, 0.02, -1.25, 0.2),
        Bin("b", 500, 0.4, 0.03, 0.5, 0.1),
    )
    found = exposed()
    assert found is not None
    weak = tuple(ColumnExposure(f"<{n}>", "number", 0.7 - n / 10, 0.25, 0.01) for n in range(8))
    found = replace(found, columns=(*weak, *found.columns))
    names = [one.name for one in sorted(found.columns, key=lambda one: -one.gain)]
    assert len(names) == 12
    values = [ColumnValue(name, 0.5, 0.25, 0.75, bins) for name in names]
    values[names.index("sent")] = ColumnValue("sent", 0.1, 0.0, 0.4, bins)
    assert "stay at home" not in write_passive_report(run).read_text(encoding="utf-8")
    write_exposure(run / "passive", replace(found, values=tuple(values[::-1])))
    assert (run / "passive" / "exposure.json").stat().st_mode & 0o077 == 0
    first, details = write_passive_report(run).read_text(encoding="utf-8").split("<details>")
    assert "That cannot be told from what we got." in first
    assert '<td class="number">cannot be told (0.00 to 0.40)</td>' in first
    assert first.count("0.50 (0.25 to 0.75)</td>") == 9
    assert "2 more columns are in the details." in first
    of_bins, of_all = details.split("<h2>All columns</h2>")
    assert shown_in_rows(first) == names[:10]
    assert shown_in_rows(of_all)[:12] == names
    assert of_bins.count("missing, from 18</td>") == 12
    at = [of_bins.index(f'scope="row">{escape(one.name)}<br>') for one in values[::-1]]
    assert at == sorted(at)
    values = [ColumnValue("<x>", 0.5, 0.25, 0.75, bins), values[names.index("sent")]]
    each = {"sent": (0.55, 0.412, 0.618), "kept": (0.001, 0, 0.021), "<b>": (0.001, 0, 0.03)}
    losses = tuple(ColumnLoss(name, *one) for name, one in each.items())
    found = replace(found, values=tuple(values), losses=losses[:1])
    write_exposure(run / "passive", found)
    first, _ = write_passive_report(run).read_text(encoding="utf-8").split("<details>")
    assert "None for sure: without any one, more than 3 of 100 of what ours say" in first
    write_exposure(run / "passive", replace(found, losses=losses))
    first, details = write_passive_report(run).read_text(encoding="utf-8").split("<details>")
    assert "nothing further was sent, and the bound for labels is the same" in first
    assert "</span></span>55 (41 to 62)</td>" in first
    assert "0.00 to 0.40" not in first
    small = "leave one of <b>kept, &lt;b&gt;</b> out of data.features in passive.yaml: without it, "
    assert f"{small}at most 3 of 100 are lost, by its interval. Without several of these" in first
    assert "&lt;x&gt;<br>0.50 (0.25 to 0.75)</th>" in details
    assert details.count("missing, from 18</td>") == 2
    figures = ("1,500", "10.0 %", "2.0 %", "-1.25", "0.20")
    assert "".join(f'<td class="number">{one}</td>' for one in figures) in details
    assert ("No sum is over a column's bin" in details) == (release == "noisy_sums")
    assert "the noisy labels. They" in details or "the noisy sums. They" in details


def test_no_character_on_the_page_is_obeyed_by_a_terminal_or_turns_the_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", active="<b>\x1b[2J\u202e")
    page = write_passive_report(run).read_text(encoding="utf-8")
    assert r"&lt;b&gt;\x1b[2J\u202e" in page
    assert page.replace("\n", "").isprintable()


def test_nothing_on_the_page_depends_on_labels(tmp_path: Path) -> None:
    """Other leak figures, which follow from labels, change no byte."""
    pages = []
    for leak in (0.9, 0.6):
        run = write_run(tmp_path / f"{leak}" / "run", leak=leak)
        text = write_passive_report(run).read_text(encoding="utf-8")
        pages.append([line for line in text.splitlines() if " UTC</td>" not in line])
    assert pages[0] == pages[1]


def test_the_command_writes_the_page_and_refuses_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert exit_code_of(main, "report", run, "--json") == 0
    written = Path(json.loads(capsys.readouterr().out)["report"])
    assert written == run / "passive" / "report.html"
    assert written.stat().st_mode & 0o077 == 0
    with pytest.raises(SettingsError, match="expected a passive party's folder"):
        write_passive_report(tmp_path)


def test_damaged_files_are_read_as_far_as_they_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run")
    transcript = run / "passive" / "transcript.jsonl"
    with transcript.open("ab") as file:
        file.write(b'{"time": 3}\n[]\nnot json\n{"time": "x", "direction": "sent", "kind": 4}\n{')
    found = read_traffic(run / "passive")
    assert found is not None
    assert (found.sent, found.received) == (Volume(2, 6000), Volume(1, 500))
    (run / "passive" / "exposure.json").write_text("{")
    with pytest.raises(SettingsError, match="not valid JSON"):
        write_passive_report(run)
    try_to_report(run / "passive")
    (record,) = caplog.records
    assert "not valid JSON; once the cause is gone: splitveil report" in record.message
    assert record.exc_info is None
    (run / "passive" / "exposure.json").unlink()
    transcript.unlink()
    page = write_passive_report(run).read_text(encoding="utf-8")
    assert "of a size that is not recorded, went to" in page
    assert "was not measured" in page
    assert "Not measured</span>" in page


@pytest.mark.parametrize(
    ("figures", "limit", "badge", "style"),
    [
        ((0.8, 0.59, 0.01), None, "Columns can be guessed", "unknown"),
        ((0.8, 0.59, 0.01), 0.25, "Average above the limit, 0.25", "fail"),
        ((0.8, 0.59, 0.01), 0.26, "Average within the limit, 0.26", "within"),
        ((0.62, 0.59, 0.005), None, "Columns can be guessed in part", "unknown"),
        ((0.62, 0.59, 0.02), None, "No gain measured, none excluded", "unknown"),
    ],
)
def test_the_badge_says_what_was_measured_and_nothing_is_ever_green(
    tmp_path: Path, figures: tuple[float, float, float], limit: float | None, badge: str, style: str
) -> None:
    """The mean disclosure of the two columns of the first three is .256."""
    run = write_run(tmp_path / "run", max_exposure=limit)
    columns = (
        ColumnExposure("kept <b>", "category", 0.3, 0.3, 0.0),
        ColumnExposure("tariff", "category", *figures),
    )
    found = FeatureExposure(4000, 8, columns, 5000, ("id",), has_images=True)
    write_exposure(run / "passive", found)
    first, _ = write_passive_report(run).read_text(encoding="utf-8").split("<details>")
    assert f'<section class="verdict {style}"' in first
    assert f">{badge}</span>" in first
    assert ("knows “tariff” of" in first) == ("none excluded" not in badge)
    assert first.index(">tariff<") < first.index(">kept &lt;b&gt;<")
    examined = first.split("What was not examined")[1]
    for left_out in ("Better methods", "too few records of most values: id.", "Images."):
        assert left_out in examined
