"""The site as people read it: each page in a real browser, on a phone and a screen, in light and dark."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts.staging.wait import until
from tests.harness.browser import Browser
from tests.machine.conftest import CLONE

_READING = (Path(__file__).parent / "reading.js").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as scripts/site builds it."""
    directory = tmp_path_factory.mktemp("site") / "pages"
    done = subprocess.run(
        [CLONE / "scripts" / "site", directory], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.splitlines()[-1])
    return directory


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The site's URL."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser.running() as browser:
        yield browser


def _ask(browser: Browser, name: str) -> Any:
    return browser.run(f"{_READING}\nreturn {name}()")


def _pages(site: Path) -> list[str]:
    return sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_page_reads_well(browser: Browser, site: Path, served: str, width: int, dark: bool) -> None:
    """No error, no request that fails or goes elsewhere, nothing wider than the window, no faint text."""
    faults = []
    browser.screen(width, 800, dark=dark, phone=width < 400)
    for page in _pages(site):
        browser.go(f"{served}/{page}")
        faults += [f"{page}: {complaint}" for complaint in browser.complaints()]
        requests = [(url, fault) for url, fault in browser.requests() if not url.startswith("data:")]
        assert requests, page
        faults += [f"{page}: {url} {fault}" for url, fault in requests if fault or not url.startswith(served)]
        faults += [f"{page}: wider than {width} px: {part}" for part in _ask(browser, "wider")]
        faults += [f"{page}: faint: {text}" for text in _ask(browser, "faint")]
        assert _ask(browser, "ground") < 0.2 if dark else _ask(browser, "ground") > 0.8, page
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("way", ["http", "file"])
def test_search_finds_quota(browser: Browser, site: Path, served: str, way: str) -> None:
    """Served, and from a disk without a server."""
    browser.screen(1280, 800, dark=False)
    browser.go(f"{served if way == 'http' else site.as_uri()}/index.html")
    browser.run('document.querySelector(".md-search__button").click()')
    until(lambda: _ask(browser, "typing"), 10, "the field has the focus")
    browser.type("quota")
    until(lambda: any("/limits.html" in found for found in _ask(browser, "results")), 10, "the page of limits is found")
    # From a disk a page may not read the list of its translations; all languages have their links all the same.
    assert not [each for each in browser.complaints() if way == "http" or "/sitemap.xml" not in each]


def test_persian_is_read_from_right_to_left(browser: Browser, served: str) -> None:
    """The text, but not commands; and the other languages are one click away."""
    browser.screen(360, 800, dark=False, phone=True)
    browser.go(f"{served}/fa/index.html")
    direction = "return getComputedStyle(document.querySelector(arguments[0])).direction"
    assert [browser.run(direction, of) for of in ("body", "article h1", "article pre")] == ["rtl", "rtl", "ltr"]
    assert browser.run("return document.documentElement.lang") == "fa"
    links = browser.run('return [...document.querySelectorAll("a[hreflang]")].map((a) => a.hreflang)')
    assert {*links} >= {"en", "fa", "ru", "zh"}
