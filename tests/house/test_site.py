"""The site of docs/: every page is on it and says what it is for, translations name what they were made from."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.pages import Layout, Sources, faults, version
from scripts.pictures.__main__ import pictures
from scripts.pictures.record import recording
from scripts.pictures.sequence import sequence
from scripts.staging.terminal import Terminal

ROOT = Path(__file__).parents[2]
SOURCES = Sources.of(ROOT)
PAGES = SOURCES.pages()
TRANSLATIONS = [file for language in SOURCES.languages for file in SOURCES.pages(language).values()]
_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def test_every_page_is_in_the_nav() -> None:
    """The nav of mkdocs.yml has each page of docs/ once, and only files that exist."""
    assert {file for file in PAGES.values() if file.parent == ROOT / "docs"} == {
        file for file in (ROOT / "docs").glob("*.md") if file not in TRANSLATIONS
    }
    assert all(file.is_file() for file in PAGES.values())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_it_is_for(name: str) -> None:
    """A title, and below it a sentence: no table, list or code."""
    title, blank, first, *_ = PAGES[name].read_text().split("\n")
    assert re.match(r"# \S", title)
    assert not blank
    assert re.match(r"[A-Z“]?[\w-]", first) and len(first.split()) > 4, first


@pytest.mark.parametrize("file", TRANSLATIONS, ids=lambda file: file.name)
def test_a_translation_has_its_page(file: Path) -> None:
    """It is a translation of a page that exists, and the site has a note of its version."""
    name, code = file.name.split(".")[:2]
    [language] = [language for language in SOURCES.languages if language.code == code]
    assert (ROOT / "docs" / f"{name}.md").is_file()
    assert re.search(r"^english: [0-9a-f]{40}$", file.read_text(), re.MULTILINE)
    assert language.made and language.changed


def _parts(page: Path) -> list[list[str]]:
    """What a page and its translation have in common: blocks of code, headings, rows, items, and code in sentences."""
    text = page.read_text()
    prose = _BLOCK.sub("", text)
    same = [re.findall(rf"^{start}", prose, re.MULTILINE) for start in ("#+ ", r"\|", r"(?:-|\d\.) ")]
    return [_BLOCK.findall(text), *same, sorted({" ".join(code.split()) for code in re.findall("`[^`]+`", prose)})]


@pytest.mark.parametrize("file", TRANSLATIONS, ids=lambda file: file.name)
def test_a_translation_leaves_nothing_out(file: Path) -> None:
    """It has all parts of its page, unless that has changed since, of which the site has a note."""
    page = ROOT / "docs" / f"{file.name.split('.')[0]}.md"
    if f"english: {version(page.read_bytes())}\n" in file.read_text():
        assert _parts(file) == _parts(page)


def test_the_version_is_that_of_git(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("# سلام\n")
    printed = subprocess.run(["git", "hash-object", file], capture_output=True, text=True, check=True).stdout
    assert version(file.read_bytes()) == printed.strip()


def _repository(root: Path, made_from: str) -> Path:
    """A repository with two pages, one of them translated."""
    (root / "docs" / "site").mkdir(parents=True)
    (root / "protos").mkdir()
    (root / "protos" / "a.proto").write_text("syntax")
    (root / "MORE.md").write_text("# More\n\n[Two](docs/two.md#b)\n")
    (root / "docs" / "one.md").write_text("# One\n\n[a](two.md#b) [m](../MORE.md) [p](../protos/a.proto)\n")
    (root / "docs" / "two.md").write_text("# Two\n\n```md\n[a](../MORE.md)\n```\n\n| `a\\|b` |\n")
    (root / "docs" / "one.fa.md").write_text(
        f"---\nenglish: {made_from}\n---\n\n# Eins\n\n[a](two.md#b) [o](one.fa.md)\n"
    )
    language = 'fa: {name: F, english: E, made: "made from [it]({page}) at {version}", changed: "it changed"}'
    (root / "mkdocs.yml").write_text(
        "nav: [one.md, {Second: two.md}, {About: [../MORE.md]}]\nextra: {}\ntheme: {}\n"
        f"languages: {{{language}}}\n"
    )
    return root


def test_links_out_of_the_docs_lead_to_the_site(tmp_path: Path) -> None:
    """To pages of other directories, and to copies of other files; not in code. Bars in cells have no backslash."""
    sources = Sources.of(_repository(tmp_path / "repository", "0" * 40))
    Layout(sources, tmp_path / "en").make()
    docs = tmp_path / "en" / "docs"
    assert "[a](two.md#b) [m](repository-more.md) [p](files/protos/a.proto.txt)" in (docs / "one.md").read_text()
    assert (docs / "files" / "protos" / "a.proto.txt").read_text() == "syntax"
    assert "[a](../MORE.md)\n```\n\n| `a|b` |" in (docs / "two.md").read_text()
    assert "[Two](two.md#b)" in (docs / "repository-more.md").read_text()


@pytest.mark.parametrize("changed", [False, True])
def test_a_translation_has_a_note(tmp_path: Path, changed: bool) -> None:
    """Of the version that it was made from; and that the English page is another one now, if it is."""
    root = _repository(tmp_path / "repository", "0" * 40)
    made_from = "0" * 40 if changed else version((root / "docs" / "one.md").read_bytes())
    (root / "docs" / "one.fa.md").write_text((root / "docs" / "one.fa.md").read_text().replace("0" * 40, made_from))
    sources = Sources.of(root)
    Layout(sources, tmp_path / "fa", sources.languages[0]).make()
    page = (tmp_path / "fa" / "docs" / "one.md").read_text()
    assert f"made from [it](../one.html) at {made_from[:8]}" in page
    assert ("it changed" in page) is changed
    assert "[a](../two.html#b) [o](one.md)" in page


def test_faults_of_pages_are_found(tmp_path: Path) -> None:
    """Links that lead nowhere, and requests to other hosts; links to other hosts are not followed."""
    (tmp_path / "a.html").write_text(
        '<h1 id="x"></h1><a href="#x"></a><a href="b.html#y"></a><a href="c.html"></a><a href="https://example.com"></a>'
        '<img src="https://example.com/a.png"><script src="a.html"></script>'
    )
    (tmp_path / "b.html").write_text("")
    assert list(faults(tmp_path)) == [
        "a.html links to b.html#y: the page has no such anchor",
        "a.html links to c.html: no such file",
        "a.html requests https://example.com/a.png: the site must do without other hosts",
    ]


def _rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page, without bold."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_comparison_has_the_figures_of_the_benchmarks() -> None:
    """Each row beside the other node is one of the table that the bench printed, and bold where this one is worse."""
    why, benchmarks = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("why", "benchmarks"))
    printed = {row[0]: (row[1], row[2], row[5]) for row in _rows(benchmarks) if len(row) == 8}
    section = why.partition("## Beside the Go node")[2].partition("\n## ")[0]
    compared = _rows(section)[1:]
    assert len(compared) > 10
    assert {row[0]: tuple(row[1:]) for row in compared} == {row[0]: printed[row[0]] for row in compared}
    for name, unit, ours, other in compared:
        one, two = (float(cell.replace(",", "")) for cell in (ours, other))
        assert (f"| **{name}** |" in section) is (one < two if unit in ("/s", "%") else one > two), name


def test_the_other_figures_are_those_of_the_benchmarks() -> None:
    """Each figure of the second part is in docs/benchmarks.md, and so is its bench."""
    why, benchmarks = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("why", "benchmarks"))
    section = why.partition("## What holds while things change")[2].partition("\n## ")[0]
    tables = "\n".join(" ".join(row) for row in _rows(section))
    figures = re.findall(r"[\d,.]*\d(?: of [\d,]+\d)?", tables)
    assert len(figures) > 20
    assert [each for each in figures if not re.search(rf"(?<![\d,.]){re.escape(each)}(?![\d,]*\d)", benchmarks)] == []
    assert all(f"scripts.bench.{name}" in benchmarks for name in re.findall(r"scripts\.bench\.(\w+)", tables))


def test_the_drawings_are_those_of_their_texts() -> None:
    """`python -m scripts.pictures` would change nothing, and each file of docs/pictures is on a page."""
    assert {file.name for file, text in pictures().items() if file.read_text() != text} == set()
    pages = "".join(file.read_text() for file in PAGES.values())
    assert all(f"pictures/{file.name}" in pages for file in (ROOT / "docs" / "pictures").glob("*.svg"))


def test_drawings_request_nothing() -> None:
    """They have no link to another host, and no script: a browser shows them as they are."""
    for file in (ROOT / "docs").rglob("*.svg"):
        root = ElementTree.fromstring(file.read_text())
        assert not [node.tag for node in root.iter() if node.tag.rpartition("}")[2] in ("script", "image", "a", "use")]
        assert not re.findall(r"(?:href|src)=|@import|url\((?!#)", file.read_text())


def test_a_sequence() -> None:
    """Each party and each word is there, a message goes from one to the other, and nothing lies outside."""
    root = ElementTree.fromstring(
        sequence("T < 1\nA | B | C\nA > C: go\nB +: begins\nC >> A: a long reply " + 9 * "word ")
    )
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    words = [node for node in root.iter() if node.tag.endswith("text")]
    assert {"A", "B", "C", "go", "begins"} <= {node.text for node in words}
    assert all(0 < float(node.attrib["x"]) < width and 0 < float(node.attrib["y"]) < height for node in words)
    arrows = [node.attrib["d"] for node in root.iter() if "marker-end" in node.attrib]
    ends = [tuple(map(float, re.findall(r"M([\d.]+) .*H([\d.]+)", path)[0])) for path in arrows]
    assert ends[0][0] < ends[0][1] and ends[1][0] > ends[1][1]


def test_a_faulty_sequence() -> None:
    with pytest.raises(ValueError, match="no event: A B"):
        sequence("T\nA | B\nA B")


def test_a_recorded_terminal(tmp_path: Path) -> None:
    """Letters, colours and bold are those of the screen; empty lines at its end are left out."""
    script = r"printf '\033[1;32mgreen\033[0m plain <&>\n\033[7mturned\033[0m'; read -r _"
    with Terminal(["sh", "-c", script], {"PATH": os.environ["PATH"]}, tmp_path, columns=30, rows=8) as terminal:
        terminal.find("turned")
        root = ElementTree.fromstring(recording("a title", terminal.cells))
    words = [
        (node.text, node.attrib.get("font-weight"), node.attrib["fill"]) for node in root if node.tag[-4:] == "text"
    ]
    assert [word[0] for word in words] == ["a title", "green", " plain <&>", "turned"]
    assert words[1][1] == "600" and words[2][1] is None
    assert words[1][2] == "#3fb950"
    assert float(root.attrib["viewBox"].split()[3]) < 100
