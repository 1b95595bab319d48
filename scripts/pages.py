"""Builds the site of docs/ and mkdocs.yml into a directory: `scripts/site` calls it in an environment of its own.

The builder, Zensical, makes a site in one language of one directory. So this first lays out a directory a language:
links out of docs/ become links on the site, and each translation gets a note of the version of the English page that it
was made from. Afterwards it checks every link of the pages that the builder made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).parents[1]
_FENCED = re.compile(r"(^ *(`{3,}|~{3,}).*?^ *\2$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
_CODE = re.compile(r"`[^`\n]+`")
_HEAD = re.compile(r"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r"^# .*\n", re.MULTILINE)
_REQUESTED = {"link": "href", "script": "src", "img": "src", "source": "src", "iframe": "src", "object": "data"}


class SiteError(Exception):
    """The site is not as it must be; the text has a line for each fault."""


@dataclass(frozen=True)
class Language:
    """A language of translations, with its texts of mkdocs.yml."""

    code: str
    name: str
    english: str
    made: str
    changed: str


@dataclass(frozen=True)
class Sources:
    """What the site is made of: the repository, mkdocs.yml without its languages, and these."""

    root: Path
    settings: dict[str, Any]
    languages: tuple[Language, ...]

    @classmethod
    def of(cls, root: Path) -> Sources:
        settings = yaml.safe_load((root / "mkdocs.yml").read_text())
        languages = settings.pop("languages")
        return cls(root, settings, tuple(Language(code, **texts) for code, texts in languages.items()))

    @property
    def docs(self) -> Path:
        return self.root / "docs"

    def pages(self, language: Language | None = None) -> dict[str, Path]:
        """The pages in a language, English without one: the name on the site, and the file."""
        if language:
            suffix = f".{language.code}.md"
            return {f"{file.name.removesuffix(suffix)}.md": file for file in sorted(self.docs.glob(f"*{suffix}"))}
        named = {_name(entry): self.docs / entry for entry in entries(self.settings["nav"])}
        return {name: Path(os.path.normpath(file)) for name, file in named.items()}

    def place(self, file: Path) -> str:
        """Where the site has a file of the repository."""
        for language in (None, *self.languages):
            for name, page in self.pages(language).items():
                if page == file:
                    return f"{language.code}/{name}" if language else name
        if file.is_relative_to(self.docs):
            return str(file.relative_to(self.docs))
        return f"files/{file.relative_to(self.root)}.txt"


def entries(nav: list[Any] | str) -> Iterator[str]:
    """The files that a nav names, in its order."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav:
        for below in entry.values() if isinstance(entry, dict) else (entry,):
            yield from entries(below)


def _name(entry: str) -> str:
    """The page of a file: those of other directories are named for them, as SECURITY.md is not security.md."""
    path = PurePosixPath(entry)
    return entry if path.parts[0] != ".." else f"repository-{path.name.lower()}"


def version(text: bytes) -> str:
    """What `git hash-object` prints for a file with this text."""
    return hashlib.sha1(b"blob %d\0%s" % (len(text), text), usedforsecurity=False).hexdigest()


@dataclass
class Layout:
    """A directory for the builder, with the pages in one language."""

    sources: Sources
    directory: Path
    language: Language | None = None
    copied: set[Path] = field(default_factory=set)

    def make(self) -> None:
        """Write the settings and the pages, with the files that they name."""
        docs = self.directory / "docs"
        docs.mkdir(parents=True)
        for name, file in self.sources.pages(self.language).items():
            (docs / name).write_text(self._page(name, file))
        if not self.language:
            skipped = shutil.ignore_patterns("*.md", "node_modules", "pb", "out", "protos")
            shutil.copytree(self.sources.docs, docs, ignore=skipped, dirs_exist_ok=True)
        else:
            shutil.copytree(self.sources.docs / "site", docs / "site")
        for file in self.copied:
            copy = docs / self.sources.place(file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        (self.directory / "mkdocs.yml").write_text(json.dumps(self._settings()))

    def _page(self, name: str, file: Path) -> str:
        text = file.read_text()
        if self.language:
            text = self._noted(name, text, self.language)
        parts = _FENCED.split(text)
        # Of three parts the second is a block of code, and the third its fence.
        kept = (part for place, part in enumerate(parts) if place % 3 != 2)
        return "".join(part if place % 2 else self._prose(file, part) for place, part in enumerate(kept))

    def _prose(self, file: Path, text: str) -> str:
        text = _LINK.sub(lambda link: link[1] + self._link(file, link[2]) + link[3], text)
        # In a cell of a table Git hosts need the backslash, and the builder shows it.
        return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), text)

    def _link(self, file: Path, link: str) -> str:
        """A link of a file of the repository, as a link of its page."""
        target = Path(os.path.normpath(file.parent / link))
        if not target.is_file():
            # One to the site itself, such as that of the note: the check of all links sees whether it leads somewhere.
            return link
        page, place = self.sources.place(file), self.sources.place(target)
        if not self.language and not target.is_relative_to(self.sources.docs) and place.startswith("files/"):
            self.copied.add(target)
        same = page.rpartition("/")[0] == place.rpartition("/")[0]
        # The builder knows only the pages of one language: others are named as the site has them.
        there = place if same or not place.endswith(".md") else f"{place.removesuffix('.md')}.html"
        return os.path.relpath(there, PurePosixPath(page).parent)

    def _noted(self, name: str, text: str, language: Language) -> str:
        """A translation, with a note of what it was made from."""
        head = _HEAD.match(text)
        found = re.search(r"^english: ([0-9a-f]{40})$", head[1] if head else "", re.MULTILINE)
        if not found:
            raise SiteError(f"docs/{name} in {language.code}: its head has no line `english:` with a hash of Git")
        made_from = found[1]
        now = version(self.sources.pages()[name].read_bytes())
        note = [language.made, *([] if now == made_from else [language.changed])]
        kind = "info" if now == made_from else "warning"
        page = f"../{name.removesuffix('.md')}.html"
        said = " ".join(note).format(page=page, version=made_from[:8])
        block = f'\n!!! {kind} ""\n\n    {said}\n'
        return _TITLE.sub(lambda title: title[0] + block, text, count=1)

    def _settings(self) -> dict[str, Any]:
        settings = json.loads(json.dumps(self.sources.settings))
        up = "../" if self.language else ""
        english = {"name": "English", "link": f"{up}index.html", "lang": "en"}
        others = [
            {"name": each.name, "link": f"{up}{each.code}/index.html", "lang": each.code}
            for each in self.sources.languages
            if "index.md" in self.sources.pages(each)
        ]
        settings["extra"]["alternate"] = [english, *others]
        settings["docs_dir"] = "docs"
        settings["nav"] = _renamed(settings["nav"])
        settings["theme"]["language"] = "en"
        if self.language:
            pages = self.sources.pages(self.language)
            rest = [name for name in self.sources.pages() if name not in pages]
            links = [{_title(self.sources.pages()[name]): f"../{name.removesuffix('.md')}.html"} for name in rest]
            settings["theme"]["language"] = self.language.code
            settings["nav"] = [*pages, {self.language.english: links}]
        return dict(settings)


def _renamed(nav: Any) -> Any:
    """A nav with the names on the site."""
    if isinstance(nav, str):
        return _name(nav)
    if isinstance(nav, dict):
        return {title: _renamed(below) for title, below in nav.items()}
    return [_renamed(entry) for entry in nav]


def _title(file: Path) -> str:
    found = _TITLE.search(file.read_text())
    return found[0][2:].strip() if found else file.name


class _Page(HTMLParser):
    """The anchors of a page, its links, and what a browser requests with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.requested = {""}, set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif given.get(_REQUESTED.get(tag, ""), "") and given.get("rel") not in ("canonical", "alternate"):
            self.requested.add(given[_REQUESTED[tag]])


def faults(site: Path) -> Iterator[str]:
    """Each link of the pages of a site that leads nowhere, and each request of theirs to another host."""
    pages = {file: _Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        name = file.relative_to(site)
        for link in sorted(page.links | page.requested):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.requested and parts.scheme != "data":
                    yield f"{name} requests {link}: the site must do without other hosts"
                continue
            target = Path(os.path.normpath(file.parent / unquote(parts.path))) if parts.path else file
            if not target.is_file():
                yield f"{name} links to {link}: no such file"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name} links to {link}: the page has no such anchor"


def build(root: Path, site: Path) -> str:
    """Build the site of a repository. Returns a line on what it is. Raises `SiteError`."""
    sources = Sources.of(root)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "site"
        for language in (None, *sources.languages):
            if sources.pages(language):
                directory = Path(scratch) / (language.code if language else "en")
                Layout(sources, directory, language).make()
                _run_builder(directory)
                # Its links begin at a host's root, and the site may be elsewhere.
                (directory / "site" / "404.html").unlink()
                shutil.copytree(directory / "site", whole / language.code if language else whole)
        if found := list(faults(whole)):
            raise SiteError("\n".join(found))
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(whole, site)
    files = [file for file in site.rglob("*") if file.is_file()]
    pages, size = sum(file.suffix == ".html" for file in files), sum(file.stat().st_size for file in files)
    return f"{pages} pages, {len(files)} files, {size / 1024 / 1024:.1f} MiB in {site}"


def _run_builder(directory: Path) -> None:
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr).partition("Traceback")[0]
        raise SiteError(f"the pages in {directory.name} could not be built:\n{said}")


class _Fresh(SimpleHTTPRequestHandler):
    """Serves a site, and builds it again before a page if its sources have changed."""

    site: Path
    built: float

    def do_GET(self) -> None:
        if self.path.endswith(("/", ".html")) and (now := _newest()) > self.built:
            self.log_message("building")
            try:
                build(ROOT, self.site)
            except SiteError as error:
                self.send_error(500, "The site could not be built", str(error))
                return
            type(self).built = now
        super().do_GET()


def _newest() -> float:
    """When the sources changed last."""
    files = [ROOT / "mkdocs.yml", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*")]
    return max(file.stat().st_mtime for file in files)


def serve(port: int) -> None:
    """Serve the site on this machine until Ctrl-C."""
    with tempfile.TemporaryDirectory() as directory, suppress(KeyboardInterrupt):
        _Fresh.site, _Fresh.built = Path(directory) / "site", 0
        print(f"http://127.0.0.1:{port}/index.html, until Ctrl-C", flush=True)
        HTTPServer(("127.0.0.1", port), partial(_Fresh, directory=str(_Fresh.site))).serve_forever()


def main(arguments: list[str]) -> None:
    """`--serve PORT`, or the directory to write to."""
    if arguments[0] == "--serve":
        serve(int(arguments[1]))
        return
    try:
        print(build(ROOT, Path(arguments[0])))
    except SiteError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
