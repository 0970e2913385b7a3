"""The documents hold together: links lead somewhere, named files exist, lines are sentences."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.markdown import DOCUMENTS, ROOT, anchors, blocks, links, name_of, prose, sentences

FOLDERS = "active_party|api|benchmarks|common|deploy|docs|experiments|passive_party|protos|tests"
NAMED_PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
MADE_BY_RUNS = ("experiments/results/", "experiments/NAME.yaml")
ENDS = (".", ":", ";", "?", "!", ")", "*", "`", ">")
SECOND_SENTENCE = re.compile(r"(?<![A-Z])(?<!\bal)[.!?][)\"*]* +(?=[\"(*`\[]*[A-Z])")


def broken(document: Path) -> list[str]:
    found = []
    for target in links(document):
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_and_anchor_leads_somewhere(document: Path) -> None:
    assert broken(document) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n[here](#a-page) [there](#b) [file](none.md) [code](page.md#x)\n")
    assert broken(page) == ["#b", "none.md", "page.md#x"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_file_that_is_named_exists(document: Path) -> None:
    named = {path for line in prose(document) for path in NAMED_PATH.findall(line)}
    named = {path for path in named if not path.startswith(MADE_BY_RUNS)}
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_target_of_make_that_is_named_exists(document: Path) -> None:
    made = "\n".join(block.text for block in blocks(document) if block.language == "sh")
    named = set(re.findall(r"^make ([\w-]+)", made, re.MULTILINE))
    named |= {name for line in prose(document) for name in re.findall(r"`make ([\w-]+)`", line)}
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {name for name in named if not re.search(rf"^{name}:", targets, re.MULTILINE)} == set()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_document_can_be_reached(page: str) -> None:
    linked = {
        ((ROOT / page).parent / target.partition("#")[0]).resolve() for target in links(ROOT / page)
    }
    assert [name_of(path) for path in DOCUMENTS if path not in linked | {ROOT / page}] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_line_holds_one_sentence(document: Path) -> None:
    assert [line for line in sentences(document) if SECOND_SENTENCE.search(line)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_sentence_stands_on_one_line(document: Path) -> None:
    broken_off = [
        one
        for one, other in pairwise(sentences(document))
        if not one.endswith(ENDS) and other[:1].islower()
    ]
    assert broken_off == []


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("One sentence. Another one.", True),
        ("It ends (here). `code` begins", False),
        ("It ends. **Bold** begins.", True),
        ("Li et al. Found it, with .95 of them.", False),
    ],
)
def test_two_sentences_on_a_line_are_found(line: str, *, is_refused: bool) -> None:
    assert bool(SECOND_SENTENCE.search(line)) is is_refused
