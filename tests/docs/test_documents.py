"""The documents hold together: links lead somewhere, named files exist, tables are whole."""

import re
import tomllib
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


def unmade(document: Path) -> set[str]:
    """Return the files and targets of make that are named and do not exist."""
    named = {path for line in prose(document) for path in NAMED_PATH.findall(line)}
    absent = {path for path in named if not path.startswith(MADE_BY_RUNS)}
    absent = {path for path in absent if not (ROOT / path).exists()}
    typed = "\n".join(block.text for block in blocks(document) if block.language == "sh")
    made = set(re.findall(r"^make ([\w-]+)", typed, re.MULTILINE))
    made |= {name for line in prose(document) for name in re.findall(r"`make ([\w-]+)`", line)}
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    return absent | {x for x in made if not re.search(rf"^{x}:", targets, re.MULTILINE)}


def uneven(document: Path) -> list[str]:
    """Return the rows with more or fewer cells than their head, and heads without a rule."""
    found = []
    for head, *rows in tables(document):
        ruled = bool(rows) and set(rows[0]) <= set("|-: ")
        cells = CELL_END.findall
        found += [row for row in rows if len(cells(row)) != len(cells(head))] if ruled else [head]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_file_and_table_of_a_document_is_whole(document: Path) -> None:
    assert broken(document) == []
    assert unmade(document) == set()
    assert uneven(document) == []


def test_the_site_has_the_pages_that_the_readme_lists_and_no_page_is_missing() -> None:
    (table,) = (rows for rows in tables(ROOT / "README.md") if rows[0] == "| for | pages |")
    listed = [(row.split("|")[1].strip(), re.findall(r"\]\((.*?)\)", row)) for row in table[2:]]
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    home, *groups = site["nav"]
    assert [(name.lower(), pages) for one in groups for name, pages in one.items()] == listed
    assert {home, *(page for _, pages in listed for page in pages)} == set(map(name_of, DOCUMENTS))
