"""A real Prometheus: promtool on rules and on a scrape, and a server that scrapes a node with a core and traffic."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.staging import transfer
from scripts.staging.controller import RestController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, member, run
from tests.harness.monitoring import DASHBOARD, RULES, expressions
from tests.harness.rest import Rest

pytestmark = [pytest.mark.machine, pytest.mark.core]

# A user who runs no core.
OTHER = "nobody"
SCRAPE = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%(rules)s]
scrape_configs:
  - job_name: txnode
    scheme: https
    tls_config: {ca_file: %(certificate)s}
    authorization: {credentials: %(key)s}
    static_configs: [{targets: ["127.0.0.1:%(rest)d"]}]
  - job_name: basic
    scheme: https
    tls_config: {ca_file: %(certificate)s}
    basic_auth: {username: prometheus, password: %(key)s}
    static_configs: [{targets: ["127.0.0.1:%(rest)d"]}]
  - job_name: local
    static_configs: [{targets: ["127.0.0.1:%(metrics)d"]}]
"""


def promtool(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_do_what_they_say() -> None:
    """promtool accepts the rules and passes their unit tests."""
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    assert "SUCCESS" in promtool("test", "rules", str(RULES.with_name("rules_test.yml")))


@pytest.fixture
def place(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "in")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path, METRICS_PORT=str(free_port()), METRICS_USERS="on") as node:
        yield node


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that another user owns."""
    path = Path(tempfile.mkdtemp(prefix="txnode-prometheus-"))
    shutil.chown(path, OTHER)
    yield path
    shutil.rmtree(path)


class Prometheus:
    """A Prometheus server under another user, on a free port."""

    def __init__(self, directory: Path, node: NodeProcess) -> None:
        self.port = free_port()
        certificate, config, rules = (directory / name for name in ("node.pem", "prometheus.yml", "rules.yml"))
        certificate.write_text(node.pem)
        rules.write_text(RULES.read_text())
        ports = {"rest": node.rest_port, "metrics": int(node.environment["METRICS_PORT"])}
        config.write_text(SCRAPE % {"rules": rules, "certificate": certificate, "key": node.key, **ports})
        promtool("check", "config", str(config))
        user = pwd.getpwnam(OTHER)
        argv = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "prometheus"]
        options = [f"--config.file={config}", f"--storage.tsdb.path={directory}/data"]
        address = f"--web.listen-address=127.0.0.1:{self.port}"
        self.child = Child([*argv, *options, address], {"PATH": os.environ["PATH"]}, directory=directory)

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[Any]:
        """The current result of an expression."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found


@pytest.fixture
def prometheus(directory: Path, watched: NodeProcess) -> Iterator[Prometheus]:
    server = Prometheus(directory, watched)
    with server.child:
        yield server


def test_a_scrape_is_as_it_should_be(watched: NodeProcess, place: Place) -> None:
    """promtool accepts the names, kinds and texts of the metrics."""
    run(RestController(watched), [place], [member(TestUser.new("ann@test"), place)])
    page = Rest(watched).call("GET", "/metrics").text
    assert promtool("check", "metrics", stdin=page) == ""


def plain(expression: str) -> str:
    """The expression with Grafana's variables set to match everything."""
    ranges = {"$__rate_interval": "10s", "$__range": "1m", "$instance": ".*"}
    for name, value in ranges.items():
        expression = expression.replace(name, value)
    return expression


def compared(expression: str) -> str:
    """The expression with `bool` comparisons, so that it returns 0 or 1 wherever both sides have data."""
    for sign in ("==", ">", "<"):
        expression = expression.replace(f" {sign} ", f" {sign} bool ")
    return expression


def test_all_that_rules_and_panels_name_has_data(
    watched: NodeProcess, prometheus: Prometheus, place: Place, echo: EchoServer
) -> None:
    """All three ways of scraping work; after some traffic every expression of the dashboard has data."""
    ann = TestUser.new("ann@test")
    run(RestController(watched), [place], [member(ann, place)])
    with connection(place, ann, echo) as link:
        transfer.download(link, 100_000)
    until(lambda: len(prometheus.query("up == 1")) == 3, 60, "it scrapes in all three ways")
    until(lambda: prometheus.query('txnode_inbound_bytes_total{inbound="in", direction="downlink"} >= 100000'), 30)
    down = prometheus.query('txnode_user_bytes_total{job="local", user="ann@test", direction="downlink"}')
    assert float(down[0]["value"][1]) >= 100_000
    for expression in (*expressions(DASHBOARD), *expressions(RULES)):
        if not expression.startswith("label_values"):
            asked = compared(plain(expression))
            until(lambda asked=asked: prometheus.query(asked), 30, f"{asked} has data")  # type: ignore[misc]


def test_an_alert_fires(watched: NodeProcess, prometheus: Prometheus, place: Place) -> None:
    """An alert fires for a node that is not ready."""
    until(lambda: prometheus.query("txnode_ready == 1"), 60, "it is scraped")
    watched.stop()

    def pending() -> bool:
        return "TxnodeDown" in {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}

    until(pending, 30, "the alert is pending")
