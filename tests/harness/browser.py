"""Debian's Chromium without a screen, driven by its chromedriver over HTTP (WebDriver), and what its pages did."""

from __future__ import annotations

import base64
import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.wait import accepts

# Without these Chromium calls its maker's hosts on its own; as root it has no sandbox.
_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
_SECONDS = 60


class Browser:
    """A browser with one window. `url` is that of chromedriver's sessions."""

    def __init__(self, url: str) -> None:
        self._url = url

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        """A browser that ends with the block."""
        with ExitStack() as stack:
            home = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            port = free_port()
            environment = {"PATH": os.environ["PATH"], "HOME": home}
            driver = stack.enter_context(Child(["chromedriver", f"--port={port}"], environment))
            driver.ready(lambda: accepts(port), _SECONDS, "chromedriver answers")
            one = cls(f"http://127.0.0.1:{port}/session")
            options = {"args": [*_QUIET, f"--user-data-dir={home}/profile"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
            made = one._ask("", {"capabilities": {"alwaysMatch": wanted}})
            one._url += f"/{made['sessionId']}"
            stack.callback(one._ask, "", None, "DELETE")
            one.go("about:blank")
            one._entries("performance")  # of the page that it opens with
            yield one

    def go(self, url: str) -> None:
        """Load a page, with all that it names."""
        self._ask("/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a function of JavaScript in the page. Returns its result."""
        return self._ask("/execute/sync", {"script": script, "args": arguments})

    def screen(self, width: int, height: int, *, dark: bool, phone: bool = False) -> None:
        """The size of the window, and which colours the person prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self._command("Emulation.setDeviceMetricsOverride", **size)
        preferred = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._command("Emulation.setEmulatedMedia", features=preferred)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        keys = [{"type": kind, "value": letter} for letter in text for kind in ("keyDown", "keyUp")]
        self._ask("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def complaints(self) -> list[str]:
        """What the pages have written to the console since the last call: warnings and errors."""
        return [entry["message"] for entry in self._entries("browser") if entry["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> Iterator[tuple[str, str]]:
        """What the pages have requested since the last call: each URL, and "" or what went wrong."""
        urls: dict[str, str] = {}
        for entry in self._entries("performance"):
            message = json.loads(entry["message"])["message"]
            method, found = message["method"], message["params"]
            if method == "Network.requestWillBeSent":
                urls[found["requestId"]] = found["request"]["url"]
                yield found["request"]["url"], ""
            elif method == "Network.loadingFailed":
                yield urls.get(found["requestId"], "?"), found["errorText"]
            elif method == "Network.responseReceived" and found["response"]["status"] >= 400:
                yield found["response"]["url"], str(found["response"]["status"])

    def picture(self, file: Path) -> None:
        """Save the window as a PNG."""
        file.write_bytes(base64.b64decode(self._ask("/screenshot", None, "GET")))

    def _entries(self, log: str) -> list[Any]:
        return list(self._ask("/se/log", {"type": log}))

    def _command(self, name: str, **parameters: object) -> None:
        self._ask("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _ask(self, path: str, body: object, verb: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=verb)
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            return json.load(reply)["value"]
