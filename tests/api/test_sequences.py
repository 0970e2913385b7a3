"""Texts and sequences reach a model by name, which may begin with an encoder from a file."""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from splitveil import DataError, SettingsError, models, simulate
from splitveil.common.data import sequences
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.models.factory import build_bottom_model
from tests.api.test_simulate import ONE_CORE
from tests.data.test_data_columns import load
from tests.models.test_models import custom
from tests.support.peers import Lost, dying
from tests.support.runs import Parties, build_parties, run_in_process
from tests.support.texts import ENCODER, TOKENS, Encoder, write_folder, write_tokenizer

DEPTH_2 = ["contract.pipeline_depth=2", "contract.checkpoint_steps=2"]


def parties_in(folder: Path, *passive: str, runs: Path | None = None) -> Parties:
    return build_parties(folder, DEPTH_2, [*DEPTH_2, *passive], runs=runs)


def test_a_killed_run_goes_on_with_the_same_weights_and_not_with_others(tmp_path: Path) -> None:
    write_folder(tmp_path)
    runs = tmp_path / "runs"
    with pytest.raises(Lost):
        run_in_process(parties_in(tmp_path, runs=runs), dying(5, after=True))
    content = (tmp_path / ENCODER).read_bytes()
    save_file(Encoder(len(TOKENS)).state_dict(), tmp_path / ENCODER)
    other = parties_in(tmp_path, runs=runs)
    with pytest.raises(DataError, match="files of pretrained weights, are not those"):
        other.run.reopen()
    (tmp_path / ENCODER).write_bytes(content)
    again = parties_in(tmp_path, runs=runs)
    assert again.session.reopen()
    run_in_process(again)


# ---- cells ----

LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "lists": lambda rows: pa.array(rows, pa.list_(pa.int16())),
    "large lists": lambda rows: pa.array(rows, pa.large_list(pa.uint64())),
    "text": lambda rows: [None if row is None else " | ".join(map(str, row)) for row in rows],
}


@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
@pytest.mark.parametrize("kind", LISTS)
def test_sequences_are_padded_and_cut_and_gaps_are_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, cache: dict[str, str]
) -> None:
    """Columns are in the order of the settings, and ``sequences`` precede what a pattern takes."""
    write_tokenizer(tmp_path / "tokenizer.json")
    columns = {
        "visits": LISTS[kind]([[7, 0, 7], [3, 1, 2, 3], [], None, [0]]),
        "note": ["good  film", "the bad plot twist", None, "", "good"],
    }
    sequences = {
        "note": {"tokenizer": "tokenizer.json", "max_length": 4},
        "visits": {"num_tokens": 8, "max_length": 3},
    }
    # No token is a gap, whatever stands for one.
    chosen = {"categorical": "*", "sequences": sequences, "missing_texts": ["", "7"]}
    data = load(tmp_path, columns, **chosen, **cache)
    encoder = data.fit(np.array([0, 1, 4]))
    assert encoder is not None
    again = FeatureEncoder.from_state(json.loads(json.dumps(encoder.state())))
    assert again == encoder
    found = again.transform(data.table, np.array([1, 0, 2, 3, 4, 1]))
    rows = [[1, 6, 3, 5, 3, 1, 2], [1, 2, 4, 0, 7, 0, 7], [0] * 7, [0] * 7, [1, 2, 0, 0, 0, 0, 0]]
    lengths = [[4, 3], [3, 3], [0, 0], [0, 0], [2, 1]]
    assert found.tokens is not None
    assert found.lengths is not None
    assert found.tokens.tolist() == [*rows, rows[0]]
    assert found.lengths.tolist() == [*lengths, lengths[0]]
    assert found.categorical is None
    assert encoder.shapes.num_tokens == (7, 8)
    first = found.rows(torch.tensor([1])).tensors()
    assert torch.equal(first[0], found.tokens[1:2])
    for name in ("note", "visits"):
        assert f"column {name!r}: 1 of 3 sequences are longer than max_length" in caplog.text


def test_a_mean_of_tokens_is_what_the_models_of_settings_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames too: a list of whole numbers is a sequence, and a text if the settings say so."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json")
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 300)
    words = [f"the {('bad', 'good')[label]} film" for label in labels]
    visits = [[5] * 4 * label + [int(draw.integers(6, 9))] for label in labels.tolist()]
    tokenizer = {"tokenizer": "tokenizer.json", "max_length": 5}
    active, shared = {"label": labels}, {"passive.data.features.sequences.note": tokenizer}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("mlp", {"note": words}, shared),
        ("tabular", {"visits": visits}, {}),
        ("wide_deep", {"note": words, "visits": visits}, shared),
    ]
    for model, columns, own in cases:
        bottom = {"kind": model, "hidden": [16]}
        chosen = {**ONE_CORE, **own, "passive.bottom_model": bottom}
        chosen["passive.optimizer.learning_rate"] = 0.02
        (run,) = simulate(active=active, passive=columns, attacks=[], settings=chosen, key=None)
        assert run.test_auc is not None
        assert run.test_auc > 0.99


SEQUENCE = {"max_length": 4, "num_tokens": 8}
NO_UNK = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "u"}}'
NO_MERGE = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}}'
BAD_CELLS: list[tuple[dict[str, Any], Any, str]] = [
    ({}, [[1], [8]], r"expected whole numbers from 0 to 7 in row 2"),
    ({}, ["1", "2|x", "-1"], r"expected whole numbers from 0 to 7 in rows 2, 3"),
    ({}, [[1, None, 2], [1]], r"expected whole numbers from 0 to 7 in row 1"),
    ({}, ["1||2"], r"expected whole numbers from 0 to 7 in row 1"),
    ({}, ["1" * 30], r"expected whole numbers from 0 to 7 in row 1"),
    ({}, pa.array([[0.5]]), r"expected text or whole numbers, not double"),
    ({"num_tokens": None}, ["a"], r"expected num_tokens for whole numbers, or a tokenizer"),
    ({"tokenizer": "t.json"}, ["a"], r"expected num_tokens for whole numbers, or a tokenizer"),
]
BAD_TOKENIZERS = [
    (None, r"t\.json: there is no such file"),
    ("", r"expected a file of the library tokenizers.*EOF"),
    ("{}", r"expected a file of the library tokenizers.*Model missing"),
    (NO_UNK.replace('"a": 0', ""), r"expected a vocabulary"),
    (NO_UNK, r"column 'c': its tokenizer cannot split a text"),
    (NO_MERGE, r"t\.json: expected a file of the library tokenizers.*PanicException: range end"),
]


def ruled(*rules: object, pre_tokenizer: Any = None, special: int = 0) -> str:
    """Return a tokenizer with these normalizers."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    tokenizer.normalizer = normalizers.Sequence(list(rules))
    tokenizer.pre_tokenizer = pre_tokenizer
    many = TemplateProcessing(f"{special * '[UNK] '}$A", None, [("[UNK]", 0)])
    tokenizer.post_processor = many
    return str(tokenizer.to_str())


def mapped_to(text: str) -> str:
    """Return a tokenizer with a map that no character is in, which has room for this text."""
    tree = bytes(4 * 256)
    coded = base64.b64encode(len(tree).to_bytes(4, "little") + tree + text.encode() + b"\0")
    one = {"type": "Precompiled", "precompiled_charsmap": coded.decode()}
    return json.dumps(json.loads(ruled()) | {"normalizer": one})


GROWING = [
    ruled(*6 * [normalizers.Replace("a", 20 * "a")]),
    ruled(*20 * [normalizers.Replace(Regex(""), "a")]),
    ruled(*20 * [normalizers.Prepend("a")]),
    ruled(*9 * [normalizers.NFKD(), normalizers.Replace("\u0644", "\ufdfa")]),
    ruled(*20 * [normalizers.ByteLevel()]),
    ruled(pre_tokenizer=pre_tokenizers.Sequence(20 * [pre_tokenizers.ByteLevel()])),
    ruled(special=5000),
    mapped_to(5000 * "a"),
]


@pytest.mark.parametrize("content", GROWING)
def test_a_tokenizer_that_can_make_texts_grow_without_end_is_refused(
    tmp_path: Path, content: str
) -> None:
    """Before it reads a text."""
    (tmp_path / "t.json").write_text(content)
    chosen = {"c": {"max_length": 4, "tokenizer": "t.json"}}
    with pytest.raises(SettingsError, match=r"t\.json: its rules .* 4,000 times as long"):
        load(tmp_path, {"c": ["b"]}, sequences=chosen).fit(np.array([0]))


USUAL = [
    *[normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents()],
    *[normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")],
]


@pytest.mark.parametrize(
    "content",
    [
        ruled(*USUAL, pre_tokenizer=pre_tokenizers.Metaspace()),
        ruled(normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer()),
        ruled(normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")),
        ruled(normalizers.NFC(), pre_tokenizer=pre_tokenizers.ByteLevel()),
        mapped_to(33 * "a"),
    ],
)
def test_usual_tokenizers_are_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    chosen = {"c": {"max_length": 4, "tokenizer": "t.json"}}
    data = load(tmp_path, {"c": ["a"]}, sequences=chosen)
    assert data.fit(np.array([0])) is not None


@pytest.mark.parametrize(
    ("pattern", "cell"), [("(a+)+$", 26 * "a" + "b"), (4 * "[ab]*" + "c", 110 * "a" + "xc")]
)
def test_a_tokenizer_that_panics_or_hangs_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, cell: str
) -> None:
    """What a library in Rust raises when it panics is no Exception."""
    if len(cell) > 100:
        monkeypatch.setattr(sequences, "_LIMIT_S", 0.2)
        monkeypatch.setattr(sequences, "_CHARACTERS_PER_S", 1e9)
    rule = pre_tokenizers.Split(Regex(pattern), "isolated")
    (tmp_path / "t.json").write_text(ruled(pre_tokenizer=rule))
    chosen = {"c": {"max_length": 4, "tokenizer": "t.json"}}
    with pytest.raises((SettingsError, DataError), match="takes longer than"):
        load(tmp_path, {"c": [cell]}, sequences=chosen).fit(np.array([0]))


def test_what_is_no_sequence_or_tokenizer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changed, cells, message in BAD_CELLS:
        chosen = {name: one for name, one in (SEQUENCE | changed).items() if one is not None}
        with pytest.raises((SettingsError, DataError), match=message):
            load(tmp_path, {"c": cells}, sequences={"c": chosen})
    of_text = {"c": {"max_length": 4, "tokenizer": "t.json"}}

    def fit() -> object:
        return load(tmp_path, {"c": ["q"]}, sequences=of_text).fit(np.array([0]))

    for content, message in BAD_TOKENIZERS:
        if content is not None:
            (tmp_path / "t.json").write_text(content)
        with pytest.raises((SettingsError, DataError), match=message):
            fit()
    with pytest.raises(SettingsError, match="'id': a column is one of id"):
        load(tmp_path, {"c": ["1"]}, sequences={"c": SEQUENCE, "id": SEQUENCE})
    data = load(tmp_path, {"c": ["1|7"]}, sequences={"c": SEQUENCE})
    encoder = data.fit(np.array([0]))
    assert encoder is not None
    (column,) = encoder.sequences
    fewer = encoder.model_copy(update={"sequences": (column.model_copy(update={"num_tokens": 7}),)})
    with pytest.raises(DataError, match="expected tokens below 7 as in the training"):
        fewer.transform(data.table, np.array([0]))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingsError, match=r"splitveil\[text\]"):
        fit()


def test_special_tokens_that_are_too_many_are_cut_off_as_well(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t.json", "[CLS] [UNK]")
    chosen = {"c": {"max_length": 1, "tokenizer": "t.json"}}
    data = load(tmp_path, {"c": ["good film"]}, sequences=chosen)
    encoder = data.fit(np.array([0]))
    assert encoder is not None
    tokens = encoder.transform(data.table, np.array([0])).tokens
    assert tokens is not None
    assert tokens.tolist() == [[1]]


def test_a_tokenizer_that_drops_merges_at_random_does_so_in_no_run(tmp_path: Path) -> None:
    merges = BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    Tokenizer(merges).save(str(tmp_path / "t.json"))
    chosen = {"c": {"max_length": 40, "tokenizer": "t.json"}}
    data = load(tmp_path, {"c": ["ab" * 20]}, sequences=chosen)
    encoder = data.fit(np.array([0]))
    assert encoder is not None
    tokens = encoder.transform(data.table, np.array([0])).tokens
    assert tokens is not None
    assert tokens[0].tolist() == [2] * 20 + [0] * 20


# ---- weights ----


def without(name: str) -> dict[str, Tensor]:
    state = Encoder(len(TOKENS)).state_dict()
    del state[name]
    return state


def test_weights_and_names_that_do_not_fit_are_said(tmp_path: Path) -> None:
    write_folder(tmp_path)
    state = Encoder(len(TOKENS)).state_dict()
    bad: list[tuple[dict[str, Tensor] | bytes, str, str]] = [
        (without("attention.bias"), "", "'attention.bias' is absent there and 6 in the model"),
        ({**state, "more": torch.ones(2)}, "", "'more' is 2 there and absent in the model"),
        (Encoder(8).state_dict(), "", "'embeddings.weight' is 8 x 6 there and 7 x 6 in the model"),
        ({n: one.half() for n, one in state.items()}, "", "is float16 there and float32 in"),
        ({**state, "attention.bias": torch.full((6,), torch.nan)}, "", "holds NaN or infinity"),
        (b"\x80\x04]", "", r"encoder\.safetensors: cannot be read \(SafetensorError"),
        (state, "bottom_model.weights={encode: encoder.safetensors}", "no module 'encode'"),
        (
            state,
            "bottom_model.weights=absent.safetensors",
            "there is no absent.safetensors: expected a file of",
        ),
        (state, "bottom_model.frozen=[encode]", "frozen: the model has no parameter 'encode'"),
        (state, "optimizer.rates={dens: 0.1}", "rates: the model has no parameter 'dens'"),
        (state, "bottom_model.frozen=[encoder, visits, dense]", "has no trainable parameters"),
    ]
    for content, setting, message in bad:
        if isinstance(content, bytes):
            (tmp_path / ENCODER).write_bytes(content)
        else:
            save_file(content, tmp_path / ENCODER)
        with pytest.raises(SettingsError, match=message):  # and nothing is sent before
            parties_in(tmp_path, *filter(None, [setting]))
    with pytest.raises(SettingsError, match="rates: the model has no parameter 'dens'"):
        build_parties(tmp_path, [*DEPTH_2, "optimizer.rates={dens: 0.1}"], DEPTH_2)


BAG = nn.EmbeddingBag(9, 3, padding_idx=0, mode="sum")


def test_sequences_alone_go_to_the_next_parameter_without_their_lengths() -> None:
    shapes = models.FeatureShapes(num_tokens=(9,), max_lengths=(4,))
    built = build_bottom_model(custom(f"{__name__}:BAG"), shapes, (3,), seed=0)
    rows = Features(tokens=torch.tensor([[1, 2, 0, 0]]), lengths=torch.tensor([[2]]))
    assert torch.equal(built(rows), BAG.weight[[1, 2]].sum(0)[None])
