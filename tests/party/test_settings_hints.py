"""Misspelt and misplaced settings are answered with the name, and the section, that was meant."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.command_line import save_resolved, takes_up
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.contract import Contract
from splitveil.common.settings import Mark, Section, change_at, closest_setting, marked
from splitveil.deploy.overrides import refuse_unknown_settings
from splitveil.passive_party.settings import PassiveSettings
from tests.support.runs import ACTIVE, CONTRACT, write_yaml


@pytest.mark.parametrize(
    ("where", "meant"),
    [
        (["insecure_noise_seed"], "defense.insecure_noise_seed"),
        (["insecure_nonce_sed"], "insecure_nonce_seed"),
        (["optimizer", "adam", "learning_rat"], "optimizer.learning_rate"),
        (["run_name"], "contract.run_name"),
        (["data", "learning_rate"], "optimizer.learning_rate"),
        (["defense", "noisy_label", "noise_ratio"], "defense.mechanism.noise_ratio"),
        (["defense", "marvell", "power_ratio"], "defense.strength.power_ratio"),
        (["defense", "max_norm", "power_ratio"], None),
        (["optimizer", "adam", "momentum"], None),
        (["xyzzy"], None),
    ],
)
def test_the_closest_setting_is_found_in_any_section(where: list[str], meant: str | None) -> None:
    assert closest_setting(ActiveSettings, where) == meant


NOT_BESIDE_THE_SETTINGS = {"runs_dir", "base_dir"}
"""Paths that begin in the folder in which a command is started, or are no setting."""


@pytest.mark.parametrize("kind", [ActiveSettings, PassiveSettings, Contract])
def test_every_setting_that_names_a_file_is_marked(kind: type[Section]) -> None:
    """By its type, or by what its text says of it: the next one cannot be forgotten."""
    sections, found = [kind], set[str]()
    for section in sections:  # grows
        for name, field in section.model_fields.items():
            inner = set(_classes(field.annotation))
            sections += [one for one in inner if issubclass(one, Section) and one not in sections]
            text = " ".join((field.description or "").split())
            is_said = re.search(r"[Rr]elative to (this|the) settings file|written like", text)
            is_beside = is_said and "query of" not in text and "Paths in a" not in text
            if (Path in inner or is_beside) and name not in NOT_BESIDE_THE_SETTINGS:
                found.add(name)
                assert {Mark.PATH, Mark.LIBRARY} & {*field.metadata}, (section, name)
    if kind is not Contract:
        assert found >= {"path", "uri", "certificate", "tokenizer", "weights", "initial_weights"}


def _classes(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for inner in get_args(annotation):
        yield from _classes(inner)


def test_marks_hold_at_their_own_place_only() -> None:
    active, passive = (
        {".".join(place) for place in marked(kind, Mark.MAY_CHANGE)}
        for kind in (ActiveSettings, PassiveSettings)
    )
    assert {"status", "transcript", "run_budget"} <= active
    assert {"status", "transcript", "proxy_credentials"} <= passive
    assert not any("." in name for name in active | passive)
    hidden = {".".join(place) for place in marked(ActiveSettings, Mark.HIDDEN)}
    assert {"insecure_nonce_seed", "defense.insecure_noise_seed", "data.source.uri"} <= hidden
    assert "uri" not in hidden


@pytest.mark.parametrize("mark", [one for one in Mark if one is not Mark.KIND])
def test_a_field_named_like_a_marked_one_in_another_section_has_no_mark(mark: Mark) -> None:
    class Other(Section):
        here: str = "other"

    class Own(Other):
        here: Annotated[str, mark] = "own"

    class Whole(Section):
        own: dict[str, Own]
        others: tuple[Other, ...]

    values = Whole(own={"here": Own(), "b": Own()}, others=(Other(),)).model_dump()
    assert marked(Whole, mark) == {("own", "*", "here")}
    assert change_at(marked(Whole, mark), values, str.upper) == {
        "own": {"here": {"here": "OWN"}, "b": {"here": "OWN"}},
        "others": [{"here": "other"}],
    }


def test_a_kind_is_written_where_it_chooses_a_section_only() -> None:
    kinds = {".".join(place) for place in marked(ActiveSettings, Mark.KIND)}
    assert {"defense.name", "security.mode", "data.source.kind", "optimizer.kind"} <= kinds
    assert not {"contract.run_name", "leak_monitor.attacks.name"} & kinds


def test_a_changed_argument_is_shown_whatever_its_name(label_owner: Path) -> None:
    """And a seed is not: noise or batches follow from it."""
    own = {"kind": "custom", "module": "mine:Net", "arguments": {"uri": 1, "device": "a"}}
    same = [f"top_model={own}", "defense={name: iso}"]
    before = load_party_settings(ActiveSettings, label_owner, same)
    run = label_owner.parent / "run"
    run.mkdir()
    save_resolved(before, run)
    (run / "summary.json").write_text("{}")
    changed = ["top_model.arguments.uri=2", "top_model.arguments.device=b", "device=cpu"]
    seeds = ["defense.insecure_noise_seed=5", "insecure_nonce_seed=6"]
    now = load_party_settings(ActiveSettings, label_owner, [*same, *changed, *seeds])
    with pytest.raises(SettingsError) as refused:
        takes_up(now, fresh=False, folder=run)
    found = str(refused.value).partition("other settings: ")[2].partition(". Expected")[0]
    assert set(found.split("; ")) == {
        'top_model.arguments.device: "b" now, "a" then',
        "top_model.arguments.uri: 2 now, 1 then",
        "defense.insecure_noise_seed",
        "insecure_nonce_seed",
    }


def test_the_launcher_names_the_party_too() -> None:
    overrides = ("active.insecure_noise_seed=1", "passive_a.conect=x", "contract.epochs=1")
    with pytest.raises(SettingsError) as refused:
        refuse_unknown_settings((*overrides, "active.defense.anything=1", "passive.device=cpu"))
    noise_seed, connect = refused.value.problems
    assert noise_seed.startswith("--set active.insecure_noise_seed: unknown setting; ")
    assert noise_seed.endswith("did you mean 'active.defense.insecure_noise_seed'?")
    assert connect.endswith("passive_a.conect: unknown setting; did you mean 'passive_a.connect'?")


@pytest.fixture
def label_owner(tmp_path: Path) -> Path:
    """Return the settings file of a label owner whose table has the labels ``No`` and ``Yes``."""
    source = {"kind": "csv", "path": "clients.csv"}
    data = {"source": source, "id_column": "id", "label_column": "y", "positive_label": "Yes"}
    write_yaml(tmp_path, contract=CONTRACT, active=ACTIVE | {"data": data})
    (tmp_path / "clients.csv").write_text("id,y\n1,Yes\n2,No\n3,No\n")
    return tmp_path / "active.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=gpu", "device: expected auto, cpu, cuda or cuda:N; did you mean 'cuda'? (got"),
        ("device=cpuu", "did you mean 'cpu'?"),
        ("defense={name: marvel}", "'custom'; did you mean 'marvell'? (got 'marvel')"),
        ("defense=marvell", "defense: expected a section with names and values (got 'marvell')"),
        ("defense={}", "defense: expected a 'name'"),
        ("optimizer.kind=adm", "optimizer: expected a 'kind' of 'adam', 'adamw', 'sgd'; did you m"),
        ("top_model.activation=rleu", "expected 'relu' or 'leaky_relu'; did you mean 'relu'?"),
        ("top_model.hidden=16", "hidden: expected a list (got 16)"),
        ("leak_monitor={attacks: [cosin]}", "no such attack; did you mean 'cosine'? (got 'cosi"),
        ("leak_monitor={attacks: [xyz]}", "there is no such attack (there are: norm, "),
        ("contract.epochs=many", "contract.yaml: epochs: expected a whole number (got 'many')"),
        ("contract.batch_size=0", "contract.yaml: batch_size: expected at least 1 (got 0)"),
        ("optimizer.learning_rate=-1", "learning_rate: expected more than 0.0 (got -1)"),
        ("transcript=maybe", "transcript: expected true or false (got 'maybe')"),
        ("data.positive_label=yes", "positive_label: expected a text, in quotes where YAML reads"),
        ("data.positive_label='yes'", "'yes' (data.positive_label), but 'No', 'Yes'; did you m"),
        ("data.source.path=client.csv", "client.csv: there is no such file in {}; did you mean 'c"),
        ("data.source.path=dta/client.csv", "there is no folder 'dta' in {}; did you mean 'data'?"),
        ("contract=contrct.yaml", "there is no such file in {}; did you mean 'contract.yaml'?"),
    ],
)
def test_a_mistake_is_answered_with_what_is_expected_and_what_may_be_meant(
    label_owner: Path, override: str, message: str
) -> None:
    folder = label_owner.parent
    (folder / "data").mkdir()
    with pytest.raises((SettingsError, DataError)) as refused:
        PartyData.of(load_party_settings(ActiveSettings, label_owner, [override]))
    (line,) = str(refused.value).splitlines()
    assert message.format(folder) in line
    assert "Input" not in line


def test_a_mistake_in_the_contract_is_not_blamed_on_what_depends_on_its_other_settings(
    label_owner: Path,
) -> None:
    chosen = ["contract.exchange=one_shot", "defense={name: none}", "run_budget={leak_auc: 0.6}"]
    load_party_settings(ActiveSettings, label_owner, chosen)
    with pytest.raises(SettingsError, match="batch_size: expected at least 1") as refused:
        load_party_settings(ActiveSettings, label_owner, [*chosen, "contract.batch_size=0"])
    assert len(str(refused.value).splitlines()) == 1
