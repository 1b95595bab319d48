"""Which configurations get an app that reloads geo files, and the warnings about changed files."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from drivers.process.confinement import Confinement
from drivers.process.executable import Executable
from drivers.process.spawn import Spawner
from drivers.xray import executable, messages, overrides
from drivers.xray.config import Plan, plan, rerouted
from node.contract.driver import Host
from node.contract.routing import Routing
from protos.xray_pb2 import Config, GeodataConfig, TypedMessage
from scripts.staging.core import Json

SINCE = (26, 4, 25)
RULE: Json = {"routing": {"rules": [{"ip": ["geoip:private"], "outboundTag": "x"}]}}


def app(cron: str = "", assets: bytes = b"") -> TypedMessage:
    value = GeodataConfig(cron=cron, assets=[assets] if assets else [])
    return TypedMessage(type=messages.GEODATA, value=value.SerializeToString())


def planned(said: Json, version: tuple[int, ...] = SINCE, *apps: TypedMessage) -> Plan:
    return plan(Config(app=apps).SerializeToString(), json.dumps(said), frozenset(), version)


def crons(made: Plan) -> list[str]:
    return [GeodataConfig.FromString(some.value).cron for some in made.base.app if some.type == messages.GEODATA]


@pytest.mark.parametrize(
    "said",
    [
        RULE,
        {"routing": {"rules": [{"ip": "10.0.0.0/8, !geoip:cn"}]}},
        {"routing": {"rules": [{"domain": ["geosite:ads@x"]}]}},
        {"routing": {"rules": [{"domain": ["ext:mine.dat:ads"]}]}},
        {"dns": {"hosts": {"geosite:ads": "127.0.0.1"}}},
        {"dns": {"hosts": {"ext-site:mine.dat:ads": ["127.0.0.1"]}}},
        {"dns": {"servers": [{"address": "1.1.1.1", "expectIPs": ["geoip:cn"]}]}},
    ],
)
def test_a_configuration_that_names_lists(said: Json) -> None:
    made = planned(said)
    assert crons(made) == ["@every 1h"]
    assert overrides.are_reloaded(made.base)


def test_one_that_names_none() -> None:
    made = planned({"routing": {"rules": [{"domain": ["full:geosite.test", "keyword:next:"]}]}})
    assert crons(made) == [] and not overrides.are_reloaded(made.base)


def test_an_older_core_gets_none() -> None:
    """It would not start."""
    assert crons(planned(RULE, (26, 4, 24))) == []


@pytest.mark.parametrize(("cron", "is_reloaded"), [("0 4 * * *", True), ("", False)])
def test_a_configurations_own_stays(cron: str, is_reloaded: bool) -> None:
    """Without a rate the app does nothing."""
    made = planned(RULE, SINCE, app(cron))
    assert crons(made) == [cron]
    assert overrides.are_reloaded(made.base) == is_reloaded


def test_a_rule_that_is_added() -> None:
    """The next core that is launched with it reloads its geo files."""
    made = planned({})
    text = json.dumps(RULE)
    again = rerouted(made, Routing(), Config().SerializeToString(), text, SINCE)
    assert crons(again) == ["@every 1h"] and crons(made) == []
    assert crons(rerouted(again, Routing(), Config().SerializeToString(), text, SINCE)) == ["@every 1h"]


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    """A directory with two geo files, one of which is a link to elsewhere."""
    made, elsewhere = tmp_path / "lists", tmp_path / "elsewhere"
    for directory in (made, elsewhere):
        directory.mkdir()
    (made / "here.dat").touch()
    (elsewhere / "there.dat").touch()
    (made / "link.dat").symlink_to(elsewhere / "there.dat")
    return made


def changed(lists: Path, reloaded: bool) -> set[str]:
    """The files that a warning names after all were replaced."""
    spawner = Spawner(mock.Mock(), lists, {"XRAY_LOCATION_ASSET": str(lists)})
    confinement = Confinement(assets=[lists, lists.parent / "elsewhere" / "there.dat"])
    read = executable.files(Executable(Path("/bin/true"), spawner, confinement=confinement), reloaded)
    for path in (lists / "here.dat", lists.parent / "elsewhere" / "there.dat"):
        path.with_suffix(".new").write_text("another")
        path.with_suffix(".new").replace(path)
    return {path.name for path in read.changed()}


@pytest.mark.parametrize(
    ("why", "reloaded", "names"),
    [
        (None, False, {"here.dat", "link.dat"}),
        (None, True, {"link.dat"}),
        ("no Landlock", True, set()),
        ("no Landlock", False, {"here.dat", "link.dat"}),
    ],
)
def test_warnings(
    monkeypatch: pytest.MonkeyPatch, lists: Path, why: str | None, reloaded: bool, names: set[str]
) -> None:
    """No warning for a file that the core reloads; a confined core cannot reload where only one file is allowed."""
    monkeypatch.setattr("drivers.process.executable.unconfined", lambda _: why)
    assert changed(lists, reloaded) == names


@pytest.mark.parametrize(("beside", "is_whole"), [("README.md", True), ("fresh.dat", True), ("secrets", False)])
def test_the_directory_of_an_installation(tmp_path: Path, beside: str, is_whole: bool) -> None:
    """It may be read as a whole if it has nothing else: then a replaced file can be read, too."""
    host = Host(mock.Mock(), mock.Mock(), tmp_path / "run", {})
    for name in ("xray", "geoip.dat", beside):
        (tmp_path / name).touch()
    found = executable.installation(host).assets(tmp_path / "xray")
    assert (tmp_path in found) == is_whole and tmp_path / "geoip.dat" in found
