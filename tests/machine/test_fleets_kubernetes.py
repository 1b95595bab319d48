"""deploy/helm/txnode, rendered by Helm: it matches the schemas of Kubernetes, with all values and with none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.machine.tools import MAKING, Tools, run, tools

_CHART = Path(__file__).parents[2] / "deploy" / "helm" / "txnode"
_HELM = "helm.sh/helm/v3/cmd/helm@v3.22.0"
# Has the schemas of all versions of Kubernetes.
_SCHEMAS = "kubernetes-validate==1.37.0"
_VERSIONS = ("1.30", "1.33", "1.37")
_VALIDATE = """
import kubernetes_validate, sys, yaml
for document in yaml.safe_load_all(open(sys.argv[1])):
    # A kind of Prometheus' operator, of which Kubernetes knows nothing.
    if document["kind"] != "PodMonitor":
        kubernetes_validate.validate(document, sys.argv[2], strict=True)
"""
_ALL = {
    "image": {"digest": f"sha256:{'a' * 64}"},
    "imagePullSecrets": [{"name": "pull"}],
    "secrets": {"apiKey": {"name": "one"}, "apiKeys": {"name": "two"}, "certificate": {"name": "three"}},
    "settings": {"LOG_BUFFER_SIZE": 2000000, "RESUME": False, "STOP_GRACE": "0.5"},
    "hostFiles": [{"name": "letsencrypt", "path": "/etc/letsencrypt"}],
    "drainSeconds": 120,
    "updateStrategy": {"type": "OnDelete"},
    "metrics": {"annotations": True, "podMonitor": {"enabled": True, "keySecret": {"name": "scrape"}}},
    "securityContext": {"addCapabilities": ["SYS_PTRACE"], "seccompProfile": {"type": "Unconfined"}},
    "tolerations": [{"key": "edge", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-node-critical",
    "podAnnotations": {"a": "b"},
}

pytestmark = [pytest.mark.machine, pytest.mark.timeout(MAKING)]


@pytest.fixture(scope="module")
def made() -> Iterator[Tools]:
    with tools() as directory:
        yield directory


@pytest.fixture
def rendered(made: Tools, tmp_path: Path) -> Path:
    """A file for rendered manifests; their values are in values.yaml next to it."""
    return tmp_path / "rendered.yaml"


def render(made: Tools, file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Render the chart with these values into the file. Returns the manifests by kind."""
    given = file.with_name("values.yaml")
    given.write_text(yaml.safe_dump(values))
    options = ("--kube-version", "1.33.0", "--values", given)
    file.write_text(run([made.go("helm", _HELM), "template", "edge", _CHART, *options]))
    return {document["kind"]: document for document in yaml.safe_load_all(file.read_text())}


@pytest.mark.parametrize("values", [{}, _ALL], ids=["none", "all"])
def test_kubernetes_takes_it(made: Tools, rendered: Path, values: dict[str, Any]) -> None:
    """The schemas and Helm's linter accept the chart."""
    run([made.go("helm", _HELM), "lint", "--strict", _CHART, "--kube-version", "1.33.0"])
    render(made, rendered, values)
    python = made.python("kubernetes", _SCHEMAS) / "python"
    for version in _VERSIONS:
        run([python, "-c", _VALIDATE, rendered, version])


def test_the_node_has_what_it_needs_and_nothing_else(made: Tools, rendered: Path) -> None:
    """The host's network, a read-only root, no capabilities; more time to stop than to drain."""
    pod = render(made, rendered, {"drainSeconds": 120})["DaemonSet"]["spec"]["template"]["spec"]
    [node] = pod["containers"]
    assert pod["hostNetwork"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert node["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["terminationGracePeriodSeconds"] == 150
    assert node["lifecycle"]["preStop"]["sleep"]["seconds"] == 120
    assert [node[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")] == ["/livez", "/readyz"]


def test_values_arrive(made: Tools, rendered: Path) -> None:
    """Settings arrive as environment variables, secrets as files."""
    found = render(made, rendered, _ALL)
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    environment = {row["name"]: row.get("value") for row in pod["containers"][0]["env"]}
    assert environment["LOG_BUFFER_SIZE"] == "2000000"
    assert environment["RESUME"] == "off"
    mounted = [row["mountPath"] for row in pod["containers"][0]["volumeMounts"]]
    for name in ("API_KEY_FILE", "API_KEYS_FILE", "SSL_CERT_FILE", "SSL_KEY_FILE"):
        assert str(Path(environment[name] or "").parent) in mounted
    assert found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]["name"] == "scrape"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"settings": {"LOG_BUFER_SIZE": 1}}, "LOG_BUFER_SIZE"),
        ({"stopSeconds": 3}, "stopSeconds"),
        ({"securityContext": {"addCapabilities": ["NET_ADMIN"]}}, "addCapabilities"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "keySecret"),
    ],
)
def test_what_cannot_be_meant_is_refused(made: Tools, rendered: Path, values: dict[str, Any], named: str) -> None:
    """Invalid values are refused by name when the chart is rendered."""
    with pytest.raises(AssertionError, match=named):
        render(made, rendered, values)
