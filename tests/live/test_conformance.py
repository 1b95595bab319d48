"""The conformance suite against this node, over both protocols; and that it finds faults, and only those."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tests.conformance.checks  # noqa: F401 - the checks are there then
from protos.service_pb2 import BaseInfoResponse, Job, JobRequest, StatResponse
from scripts.staging import certs
from scripts.staging.node import ROOMY, NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.target import Address
from tests.conformance.__main__ import arguments, chosen, main
from tests.conformance.context import Context
from tests.conformance.registry import CHECKS, Check, Level
from tests.conformance.report import as_json, holds
from tests.conformance.runner import Outcome, Result, run_all, run_one
from tests.conformance.stage import Options, Stage
from tests.harness.broken import broken
from tests.harness.rest import Response

ROOT = Path(__file__).parents[2]
EACH = [(check, protocol) for protocol in ("rest", "grpc") for check in CHECKS.values() if protocol in check.protocols]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node"), **ROOMY) as running:
        yield running


def address(node: NodeProcess) -> Address:
    return Address(node.host, node.rest_port, node.grpc_port, node.key, node.pem)


@pytest.fixture(scope="module")
def one_stage(node: NodeProcess) -> Iterator[Stage]:
    with Stage(Options(address(node))) as running:
        yield running


@pytest.fixture
def stage(node: NodeProcess, one_stage: Stage) -> Stage:
    one_stage.options = Options(address(node))
    return one_stage


@pytest.mark.slow
@pytest.mark.parametrize(("check", "transport"), EACH, ids=lambda value: getattr(value, "id", value))
def test_we_conform(check: Check, transport: str, stage: Stage) -> None:
    """Each check of each level holds, optional ones too."""
    result = run_one(check, transport, stage)
    assert result.outcome is Outcome.PASSED, result.detail


def test_sing_box(node: NodeProcess) -> None:
    """What differs most on sing-box: users, and their bytes."""
    names = ("start.info", "stats.users", "users.sync-users")
    with Stage(Options(address(node), core="sing-box")) as stage:
        results = list(run_all((CHECKS[name] for name in names), ["grpc"], stage))
    assert [(result.check.id, result.detail) for result in results if result.outcome is not Outcome.PASSED] == []


def test_the_command(node: NodeProcess, tmp_path: Path) -> None:
    """The command prints both reports, and its exit status is whether the level holds."""
    where = ["--address", f"{node.host}:{node.rest_port}", "--grpc-port", str(node.grpc_port)]
    trust = ["--key", node.key, "--certificate", str(node.certificate.certificate)]
    command = [sys.executable, "-m", "tests.conformance", *where, *trust, "--only", "info.*", "--only", "key.*"]
    done = subprocess.run([*command, "--json", str(tmp_path / "report")], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "report").read_text())
    assert told["holds"]
    assert {row["id"] for row in told["checks"]} == {"key.x-api-key", "key.wrong", "info.running", "info.stopped"}
    assert {row["outcome"] for row in told["checks"]} == {"passed"}
    assert done.stdout.decode().splitlines()[-1] == "controllers: holds"
    assert main([*where, *trust, "--key", "wrong", "--only", "info.*"]) == 1


def without_version(verb: str, path: str, response: Response) -> Response:
    """Remove the node's version from replies."""
    if path not in ("/start", "/info") or response.status != 200:
        return response
    info = BaseInfoResponse.FromString(response.body)
    info.ClearField("version")
    return response._replace(body=info.SerializeToString())


def lossy(verb: str, path: str, response: Response) -> Response:
    """Remove a byte from each row of the statistics."""
    if path != "/stats" or response.status != 200:
        return response
    stats = StatResponse.FromString(response.body)
    for row in stats.stats:
        row.value -= row.value > 0
    return response._replace(body=stats.SerializeToString())


def quiet(verb: str, path: str, response: Response) -> Response:
    """Turn refusals of chunks into success."""
    return Response(200, {}, b"") if path == "/users/sync/chunked" else response


def hung_up(verb: str, path: str, response: Response) -> Response:
    """End the log stream."""
    return response._replace(headers={"Connection": "close"}) if path == "/logs" else response


def untouched(verb: str, path: str, response: Response) -> Response:
    return response


def anybody(node: NodeProcess) -> Callable[[dict[str, str]], dict[str, str]]:
    """Accept any key."""
    return lambda headers: {**headers, "x-api-key": node.key}


TRIED = ("key.wrong", "start.info", "stats.users", "logs.without-backend", "users.chunked-broken")
# By fault: the function that breaks the node, and the checks that must fail.
FAULTS: dict[str, tuple[Callable[[str, str, Response], Response], set[str]]] = {
    "nothing": (untouched, set()),
    "no version": (without_version, {"start.info"}),
    "a lost byte": (lossy, {"stats.users"}),
    "refusals unsaid": (quiet, {"users.chunked-broken"}),
    "logs that end": (hung_up, {"logs.without-backend"}),
    "any key": (untouched, {"key.wrong"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_broken_is_found(node: NodeProcess, stage: Stage, fault: str) -> None:
    """Exactly the checks of a fault fail, each with a text; the level does not hold then."""
    spoil, found = FAULTS[fault]
    with broken(node, spoil, anybody(node) if fault == "any key" else dict) as where:
        stage.options = Options(where, patience=3)
        results = list(run_all((CHECKS[name] for name in TRIED), ["rest"], stage))
    failed = {result.check.id: result.detail for result in results if result.outcome is Outcome.FAILED}
    assert failed.keys() == found, failed
    assert all(failed.values())
    assert holds(results, Level.CONTROLLERS) is (not found)
    assert json.loads(as_json(results, Level.CONTROLLERS, ""))["holds"] is (not found)


@pytest.mark.slow
def test_without_traffic(node: NodeProcess) -> None:
    """Checks that only traffic can decide are left out, the others hold; no level fails by that."""
    names = ("users.sync-users", "users.chunked", "users.removed-live", "stats.users", "messages.large", "keep-alive")
    with Stage(Options(address(node), traffic=False)) as stage:
        results = list(run_all((CHECKS[name] for name in (*names, "health.starting")), ["rest"], stage))
    assert {result.check.id: result.outcome for result in results} == {
        name: Outcome.PASSED if name in names[:2] else Outcome.LEFT_OUT for name in names
    }
    assert all("needs traffic" in result.detail for result in results if result.outcome is Outcome.LEFT_OUT)
    assert holds(results, Level.BEYOND)


def test_updates_that_are_allowed(tmp_path: Path) -> None:
    """On a node that allows updates the checks of them make none: no button is pressed."""
    with NodeProcess(tmp_path, UPDATES="on") as node, Stage(Options(address(node), traffic=False)) as stage:
        checks = [check for name, check in CHECKS.items() if name.startswith(("buttons.", "updates."))]
        results = list(run_all(checks, ["rest"], stage))
        jobs = jobs_of(stage)
    left_out = {result.check.id for result in results if result.outcome is Outcome.LEFT_OUT}
    assert (left_out, jobs) == ({"buttons.off"}, [])
    assert not [result.detail for result in results if result.outcome is Outcome.FAILED]


def jobs_of(stage: Stage) -> list[Job]:
    """The updates that the node remembers."""
    with closing(Context(stage, "rest")) as context:
        return list(context.node.call("GetJob", JobRequest()).jobs)


def test_levels_and_patterns() -> None:
    """A level includes those before it; a pattern selects checks; an unsupported operation fails no level."""
    assert {check.level for check in chosen(Level.BEYOND, None)} == set(Level)
    assert {check.level for check in chosen(Level.CONTROLLERS, None)} == {Level.CONTROLLERS}
    assert [check.id for check in chosen(Level.CONTROLLERS, ["lat*"])] == ["latency"]
    results = [Result(CHECKS["latency"], "rest", Outcome.UNSUPPORTED, "", 0)]
    assert holds([*results, Result(CHECKS["key.bearer"], "rest", Outcome.FAILED, "", 0)], Level.CONTROLLERS)
    assert not holds([*results, Result(CHECKS["key.bearer"], "rest", Outcome.FAILED, "", 0)], Level.BEYOND)


def test_the_page_lists_checks_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/conformance.md has the table of `python -m tests.conformance --list`, and every option."""
    page = (ROOT / "docs/conformance.md").read_text()
    assert main(["--list"]) == 0
    assert capsys.readouterr().out in page
    for option in arguments()._option_string_actions.keys() - {"-h", "--help"}:
        assert f"| `{option}` |" in page, option


WRONG = (
    ("--address", "nowhere"),
    ("--certificate", "/none"),
    ("--certificate", __file__),
    ("--only", "no"),
    ("--key", ""),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: " ".join(wrong))
def test_what_cannot_be_run(node: NodeProcess, wrong: tuple[str, str]) -> None:
    """The exit status is 2 if the checks cannot run."""
    trust = ["--key", node.key, "--certificate", str(node.certificate.certificate)]
    with pytest.raises(SystemExit) as ended:
        main(["--address", f"{node.host}:{node.rest_port}", *trust, *wrong])
    assert ended.value.code == 2


def test_a_node_that_is_not_there(tmp_path: Path) -> None:
    """Every check fails because its initial state cannot be reached, optional ones too."""
    pem = certs.make(tmp_path, ["127.0.0.1"]).certificate.read_text()
    nowhere = Address("127.0.0.1", free_port(), free_port(), "key", pem)
    with Stage(Options(nowhere)) as stage:
        results = list(run_all([CHECKS["info.running"], CHECKS["routing.rules"]], ["rest", "grpc"], stage))
    assert {result.outcome for result in results} == {Outcome.FAILED}
    assert all(result.detail.startswith("its initial state could not be reached: ") for result in results)
