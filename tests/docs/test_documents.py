"""The documents hold together: links lead somewhere, named files exist, tables are whole."""

import re
from pathlib import Path

import pytest

from tests.support.markdown import DOCUMENTS, ROOT, anchors, blocks, links, name_of, prose, tables

FOLDERS = "active_party|benchmarks|common|deploy|docs|experiments|passive_party|protos|tests"
NAMED_PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
MADE_BY_RUNS = ("experiments/results/", "experiments/NAME.yaml")
CELL_END = re.compile(r"(?<!\\)\|")


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


def uneven(document: Path) -> list[str]:
    """Return the rows with more or fewer cells than their head, and heads without a rule."""
    found = []
    for head, *rows in tables(document):
        ruled = bool(rows) and set(rows[0]) <= set("|-: ")
        cells = CELL_END.findall
        found += [row for row in rows if len(cells(row)) != len(cells(head))] if ruled else [head]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_row_of_a_table_has_the_cells_of_its_head(document: Path) -> None:
    assert uneven(document) == []


def test_a_table_that_is_split_or_uneven_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a | b |\n|---|---|\n| `x|y` | \\| |\n| 1 |\n\n| 2 | 3 |\n| 4 | 5 |\n")
    assert uneven(page) == ["| 1 |", "| 2 | 3 |"]
