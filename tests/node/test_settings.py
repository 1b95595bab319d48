"""Settings: a later source overrides, all faults are reported at once, and the key stays secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from drivers.install.releases import SING_BOX, XRAY
from drivers.registry import DRIVER_SETTINGS
from node.backend.options import BackendOptions
from node.base import env_file
from node.base.logs import LogOptions
from node.base.settings import Setting
from node.clock.clock import ClockOptions
from node.command_line import SETTINGS, Options
from node.door.options import DoorOptions
from node.handover.options import HandoverOptions
from node.keys.keyfile import door_name
from node.keys.options import KeyOptions, key_fault
from node.limits import weights
from node.limits.allowance import Allowance, Flow
from node.limits.limits import Defaults
from node.limits.options import Grouping, LimitOptions
from node.metrics.options import MetricsOptions
from node.settings import BadSettings, Settings, load
from node.state.directory import StateOptions
from node.traffic.options import TrafficOptions
from node.updates.policy import LISTS_URL, Policy

KEY = "b831381d-6324-4d53-ad4f-8cda48b30811"
NUMBERS = (
    *("REST_PORT", "GRPC_PORT", "SERVICE_PORT", "METRICS_PORT", "LOG_BUFFER_SIZE", "STOP_GRACE", "DRAIN_TIMEOUT"),
    *("CLOCK_JUMP", "DRAIN_GENERATIONS", "ADOPT_SECONDS", "TRAFFIC_INTERVAL", "LIMIT_GRACE", "LIMIT_IPV4_PREFIX"),
    *("LIMIT_IPV6_PREFIX", "NODE_QUOTA_RESET_DAY"),
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A working directory with the files that settings refer to by default."""
    var = tmp_path / "var"
    var.mkdir()
    for name in ("certificate.pem", "key.pem"):
        (var / name).touch()
    return tmp_path


def loaded(home: Path, environ: Mapping[str, str] | None = None, **options: str) -> Settings:
    return load(options, home, {"API_KEY": KEY, **(environ or {})}, drivers=DRIVER_SETTINGS)


def faults(home: Path, **environ: str) -> list[str]:
    """The lines that say what is wrong."""
    with pytest.raises(BadSettings) as bad:
        load({}, home, {"API_KEY": KEY, **environ}, drivers=DRIVER_SETTINGS)
    return bad.value.faults


def test_only_a_key_is_needed(home: Path) -> None:
    """With a key and a certificate, the defaults are valid."""
    settings = loaded(home)
    var = home / "var"
    assert settings == Settings(
        state=StateOptions(var),
        keys=KeyOptions(key=KEY, file=var / "api_keys"),
        door=DoorOptions(cert_file=var / "certificate.pem", key_file=var / "key.pem"),
        cores={
            "CORE_PATHS": "/etc/letsencrypt",
            "CORE_ALLOW": "",
            "CORE_MEMORY": "",
            "USER_INBOUNDS": "off",
            "PROXY_TO_SERVER": "block",
            "PROXY_TO_PRIVATE": "allow",
            "PROXY_INTERFACE": "auto",
            "SING_BOX_EXECUTABLE_PATH": "",
            "SING_BOX_DOWNLOAD_URL": SING_BOX.url,
            "XRAY_EXECUTABLE_PATH": "",
            "XRAY_DOWNLOAD_URL": XRAY.url,
            "XRAY_ASSETS_PATH": "",
            "XRAY_SPLICE": "off",
        },
    )


def test_the_defaults_are_these() -> None:
    """What an operator gets who sets nothing else."""
    door = DoorOptions()
    assert (door.host, door.rest_port, door.grpc_port, door.debug) == ("", 62051, 62050, False)
    assert (door.client_ca, door.newest_tls) == (None, False)
    keys = KeyOptions()
    assert (keys.key_file, keys.required, keys.certified) == (None, False, False)
    assert LogOptions() == LogOptions(buffer=10000, json=False, users=False)
    assert BackendOptions() == BackendOptions(
        stop_grace=30, drain_timeout=600, drain_generations=64, upgrade=False, outlive=False, resume=True
    )
    assert Policy() == Policy(programs=False, lists=True, lists_every=0.0, lists_url=LISTS_URL, proxy="")
    assert HandoverOptions() == HandoverOptions(adopt_seconds=300, keeper=True)
    assert TrafficOptions() == TrafficOptions(interval=10)
    assert LimitOptions().defaults == Defaults(zone=UTC)
    assert (LimitOptions().grace, LimitOptions().grouping) == (30, Grouping(32, 64))
    assert MetricsOptions() == MetricsOptions(port=None, users=False)
    assert ClockOptions().jump == 60
    assert Allowance() == Allowance(bytes=0, reset_day=1, flow=Flow.BOTH, interfaces=(), closes=False)


def test_time_zone(home: Path) -> None:
    """Quotas of users have the zone; a name that the machine does not know is a fault."""
    assert str(loaded(home, {"TIMEZONE": "Asia/Tehran"}).limits.defaults.zone) == "Asia/Tehran"
    assert faults(home, TIMEZONE="Tehran") == [
        "TIMEZONE: 'Tehran' is not a time zone: write a name such as Europe/Berlin, in upper and lower case like that"
    ]


def test_weights(home: Path) -> None:
    """Hours are in the zone; rules for inbounds need users' bytes by inbound; a rule that cannot be read is a fault."""
    found = loaded(home, {"TIMEZONE": "Asia/Tehran", "WEIGHTS": "00:00-06:00: 0.5"}).limits.weighting
    assert (str(found.zone), [rule.factor for rule in found.rules]) == ("Asia/Tehran", [500])
    assert loaded(home).limits.weighting.rules == ()
    assert faults(home, WEIGHTS="premium: 2; 00:00-06:00: 0.5") == [
        "WEIGHTS: rules for inbounds (premium) need USER_INBOUNDS=on; rules with hours alone do not"
    ]
    counted = Setting("USER_INBOUNDS", "", "off", choices=("off", "on"))
    environ = {"API_KEY": KEY, "WEIGHTS": "premium: 2", "USER_INBOUNDS": "ON"}
    assert load({}, home, environ, drivers=(*DRIVER_SETTINGS, counted)).limits.weights[0].tags == {"premium"}
    # As nodectl reads them, which does not know the settings of cores.
    assert load({}, home, environ, drivers=()).limits.weights[0].tags == {"premium"}
    assert faults(home, WEIGHTS="premium: much") == [
        "WEIGHTS: 'much' is not a factor: write a number from 0 to 100, with up to three decimals"
    ]


def test_the_examples_of_weights_work_when_pasted(home: Path) -> None:
    """They are lines of a file `.env`; the second one needs users' bytes by inbound."""
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text().partition("\n## Weights\n")[2]
    hours, inbounds = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[:2]
    (home / ".env").write_text(hours)
    found = loaded(home).limits.weighting
    assert (str(found.zone), [rule.factor for rule in found.rules]) == ("Europe/Berlin", [500, 2000])
    assert [rule.factor for rule in weights.rules(env_file.read(inbounds)["WEIGHTS"])] == [2000, 500, 1000]


def test_later_sources_override(home: Path) -> None:
    """The environment overrides `.env`, an option overrides both; an empty value counts as not set."""
    (home / ".env").write_text("REST_PORT=1001\nGRPC_PORT=1002\nNODE_HOST=::1\nDEBUG=1\n")
    settings = loaded(home, {"GRPC_PORT": "2002", "NODE_HOST": "127.0.0.1", "DEBUG": ""}, NODE_HOST="127.0.0.2")
    assert (settings.door.rest_port, settings.door.grpc_port) == (1001, 2002)
    assert (settings.door.host, settings.door.debug) == ("127.0.0.2", True)


def test_the_env_file_as_people_write_it(home: Path) -> None:
    """Comments, blank lines, `export`, quotes, spaces and lines of other programs are understood."""
    (home / ".env").write_text(
        "# REST_PORT=1\n\nexport GRPC_PORT=1002\n  NODE_HOST = '::1' \nXRAY_SPLICE=\"on\"\n"
        "OTHER=1\nnonsense\nREST_PORT=1001\n"
    )
    settings = loaded(home)
    assert (settings.door.rest_port, settings.door.grpc_port, settings.door.host) == (1001, 1002, "::1")
    assert settings.cores["XRAY_SPLICE"] == "on"


def test_a_word_in_any_case(home: Path) -> None:
    """A driver gets the word as it is declared, in whatever case it was written."""
    assert loaded(home, {"XRAY_SPLICE": "On"}).cores["XRAY_SPLICE"] == "on"


def test_an_env_file_that_cannot_be_read(home: Path) -> None:
    """A `.env` that exists and cannot be read is a fault."""
    (home / ".env").write_bytes(b"NODE_HOST=\xff\n")
    assert [".env" in fault for fault in faults(home)] == [True]


def test_paths_are_taken_from_the_working_directory(home: Path) -> None:
    """A relative path begins at the working directory, and STATE_DIR is where the other files are by default."""
    other = home / "other"
    other.mkdir()
    for name in ("certificate.pem", "key.pem"):
        (other / name).touch()
    settings = loaded(home, {"STATE_DIR": "other", "SSL_KEY_FILE": "var/key.pem"})
    assert (settings.state.dir, settings.door.cert_file) == (other, other / "certificate.pem")
    assert settings.door.key_file == home / "var" / "key.pem"


def test_every_fault_at_once(home: Path) -> None:
    """All faults are reported together, one line each, with the setting's name."""
    found = faults(
        home,
        API_KEY="short",
        REST_PORT="x",
        GRPC_PORT="70000",
        SSL_CERT_FILE="missing.pem",
        LOG_BUFFER_SIZE="0",
        DEBUG="maybe",
        XRAY_SPLICE="perhaps",
        CORE_PATHS="/etc/certs:certs",
        CORE_MEMORY="1M",
    )
    names = [
        "REST_PORT",
        "GRPC_PORT",
        "API_KEY",
        "SSL_CERT_FILE",
        "LOG_BUFFER_SIZE",
        "DEBUG",
        "XRAY_SPLICE",
        "CORE_PATHS",
        "CORE_MEMORY",
    ]
    assert sorted(fault.partition(":")[0] for fault in found) == sorted(names)
    assert not [fault for fault in found if "\n" in fault]


@pytest.mark.parametrize("name", ["STATE_DIR", "SSL_CERT_FILE", "SSL_KEY_FILE"])
def test_a_home_that_does_not_exist(home: Path, name: str) -> None:
    """A path in the home of an unknown user is a fault of that setting."""
    assert faults(home, **{name: "~nobody-of-this-name/x"})[0].startswith(name)


@pytest.mark.parametrize("text", ["0", "65536", "-1", "1.5", "x", "٣", "1e3", "9" * 5000])
def test_ports_are_numbers_in_range(home: Path, text: str) -> None:
    """A port is a decimal number from 1 to 65535; anything else is one fault."""
    (fault,) = faults(home, REST_PORT=text)
    assert fault.startswith("REST_PORT:")


@given(st.sampled_from([setting.name for setting in SETTINGS if setting.name != "API_KEY"]), st.text(max_size=20))
@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_a_setting_or_a_fault(home: Path, name: str, text: str) -> None:
    """Whatever a setting says, the node has valid settings or a list of faults."""
    try:
        settings = load({name: text}, home, {"API_KEY": KEY}, drivers=DRIVER_SETTINGS)
    except BadSettings as bad:
        assert bad.faults
    else:
        assert 1 <= (settings.door.rest_port or 1) <= 65535


def test_every_setting_is_explained() -> None:
    """Each has one line for --help and sentences for the documentation."""
    for setting in SETTINGS:
        assert "\n" not in setting.text and not setting.text.endswith(".")
        assert setting.details.endswith(".")


def test_texts_have_the_ranges_that_are_checked(home: Path) -> None:
    """For each number the help has the smallest and the largest value that the node accepts."""
    ranges = {name: re.search(r"from (\S+ to \S+)$", faults(home, **{name: "x"})[0]) for name in NUMBERS}
    texts = {setting.name: setting.text for setting in SETTINGS}
    assert not [name for name, found in ranges.items() if found is None or found[1] not in texts[name]]


# Settings of other deployed nodes

# As their installers write it: spaces around the sign, quotes, comments.
BROUGHT = """\
SERVICE_PORT= 62055
NODE_HOST = "127.0.0.1"

# use absolute path

XRAY_EXECUTABLE_PATH = /usr/local/bin/xray   # of the host
XRAY_ASSETS_PATH = '/usr/local/share/xray' # beside it
SSL_CERT_FILE= var/certificate.pem
SSL_KEY_FILE= var/key.pem
API_KEY= b831381d-6324-4d53-ad4f-8cda48b30811

### can be rest or grpc
SERVICE_PROTOCOL= "rest"
DEBUG = true
GENERATED_CONFIG_PATH = /var/lib/pg-node/generated
LOG_BUFFER_SIZE = 500
STATS_UPDATE_INTERVAL_SECONDS = 10
# STARTUP_LOG_TAIL_SIZE = 200
"""


def test_an_env_file_of_another_node(home: Path) -> None:
    """The same names mean the same; settings that mean nothing here are ignored."""
    (home / ".env").write_text(BROUGHT)
    settings = load({}, home, {}, drivers=DRIVER_SETTINGS)
    assert (settings.door.rest_port, settings.door.grpc_port, settings.door.host) == (62055, None, "127.0.0.1")
    assert (settings.keys.key, settings.door.debug, settings.log.buffer) == (KEY, True, 500)
    assert (settings.door.cert_file, settings.door.key_file) == (
        home / "var" / "certificate.pem",
        home / "var" / "key.pem",
    )
    assert settings.cores["XRAY_EXECUTABLE_PATH"] == "/usr/local/bin/xray"
    assert settings.cores["XRAY_ASSETS_PATH"] == "/usr/local/share/xray"


@pytest.mark.parametrize(
    ("text", "on"),
    [
        *[(text, True) for text in ("1", "t", "T", "true", "True", "TRUE", "yes", "on", "y")],
        *[(text, False) for text in ("0", "f", "F", "false", "False", "FALSE", "no", "off", "n")],
    ],
)
def test_on_and_off_in_every_spelling_that_nodes_accept(home: Path, text: str, on: bool) -> None:
    """DEBUG takes the spellings of all deployed nodes."""
    assert loaded(home, {"DEBUG": text}).door.debug is on


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("127.0.0.1 # all", "127.0.0.1"),
        ('"::1" # "x"', "::1"),
        ("a#b", "a#b"),
        ("a\t# b", "a"),
        (" # nothing", ""),
        ("'a # b'", "a # b"),
        ("'a", "'a"),
        ("''", ""),
    ],
)
def test_comments_after_a_value(home: Path, text: str, value: str) -> None:
    """A `#` after a space and outside of quotes begins a comment; otherwise it belongs to the value."""
    (home / ".env").write_text(f"NODE_HOST={text}\n")
    assert loaded(home).door.host == value


def test_a_byte_order_mark(home: Path) -> None:
    """Editors of other systems put one before the first name."""
    (home / ".env").write_text("NODE_HOST=::1\n", encoding="utf-8-sig")
    assert loaded(home).door.host == "::1"


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_KEY_FILE", "CLIENT_CA", "API_KEY_FILE"])
def test_a_path_that_is_too_long(home: Path, name: str) -> None:
    """It is a fault like any other missing file."""
    [fault] = faults(home, **{name: "x" * 5000}, **({"API_KEY": ""} if name == "API_KEY_FILE" else {}))
    assert fault.startswith(name)


# Ports and settings


@pytest.mark.parametrize(
    ("environ", "rest", "grpc"),
    [
        ({}, 62051, 62050),
        ({"REST_PORT": "1001"}, 1001, 62050),
        ({"SERVICE_PORT": "1000"}, None, 1000),
        ({"SERVICE_PORT": "1000", "REST_PORT": "1001"}, 1001, 1000),
        ({"SERVICE_PORT": "1000", "GRPC_PORT": "1002"}, None, 1000),
        ({"SERVICE_PORT": "1000", "SERVICE_PROTOCOL": "rest", "REST_PORT": "0"}, 1000, None),
        ({"SERVICE_PROTOCOL": "rest"}, 62051, None),
        ({"SERVICE_PROTOCOL": "grpc"}, None, 62050),
        ({"SERVICE_PROTOCOL": "REST", "SERVICE_PORT": "1000"}, 1000, None),
        ({"SERVICE_PROTOCOL": "grpc", "SERVICE_PORT": "1000"}, None, 1000),
        ({"SERVICE_PROTOCOL": "rest", "SERVICE_PORT": "1000", "GRPC_PORT": "1002"}, 1000, 1002),
        ({"SERVICE_PROTOCOL": "grpc", "SERVICE_PORT": "1000", "REST_PORT": "1001"}, 1001, 1000),
        ({"SERVICE_PROTOCOL": "rest", "REST_PORT": "1001"}, 1001, None),
    ],
)
def test_ports(home: Path, environ: dict[str, str], rest: int | None, grpc: int | None) -> None:
    """Both interfaces are on; SERVICE_PROTOCOL and SERVICE_PORT leave one, and the other only on its own port."""
    settings = loaded(home, environ)
    assert (settings.door.rest_port, settings.door.grpc_port) == (rest, grpc)


def test_one_port_for_both(home: Path) -> None:
    """Two interfaces cannot have one port; a port that is not a number is the only fault reported."""
    (fault,) = faults(home, REST_PORT="1000", GRPC_PORT="1000")
    assert "both 1000" in fault
    assert len(faults(home, REST_PORT="x", GRPC_PORT="y")) == 2


def test_an_unknown_protocol(home: Path) -> None:
    """SERVICE_PROTOCOL is rest or grpc."""
    assert [fault.partition(":")[0] for fault in faults(home, SERVICE_PROTOCOL="http")] == ["SERVICE_PROTOCOL"]


# The key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "x" * 15,
        "0" * 32,
        "00000000-0000-0000-0000-000000000000",
        "{00000000-0000-0000-0000-000000000000}",
        "urn:uuid:00000000-0000-0000-0000-000000000000",
    ],
)
def test_keys_that_are_refused(home: Path, key: str) -> None:
    """No key, a short one and the nil UUID in any spelling: the node does not start, and says what to do."""
    (fault,) = faults(home, API_KEY=key)
    assert fault.startswith("API_KEY:")
    assert key_fault(key)


@pytest.mark.parametrize("key", ["x" * 16, KEY, KEY.upper(), "ключ-ключ-ключ-ключ"])
def test_keys_that_are_accepted(home: Path, key: str) -> None:
    """Sixteen characters of any script, or a UUID."""
    assert loaded(home, {"API_KEY": key}).keys.key == key
    assert not key_fault(key)


def test_a_key_from_a_file(home: Path) -> None:
    """Without API_KEY it is read from API_KEY_FILE, or from api_key in STATE_DIR; spaces around it are dropped."""
    (home / "var" / "api_key").write_text(f"  {KEY}\n")
    (home / "elsewhere").write_text("another key, long enough\n")
    assert load({}, home, {}, drivers=()).keys.key == KEY
    assert load({}, home, {"API_KEY_FILE": "elsewhere"}, drivers=()).keys.key == "another key, long enough"
    assert load({}, home, {"API_KEY_FILE": "elsewhere", "API_KEY": KEY}, drivers=()).keys.key == KEY


def test_a_key_file_that_is_not_there(home: Path) -> None:
    """A configured key file that cannot be read is a fault, even if the default one exists."""
    (home / "var" / "api_key").write_text(KEY)
    (fault,) = faults(home, API_KEY="", API_KEY_FILE="missing")
    assert fault.startswith("API_KEY_FILE")
    assert "missing" in fault


def test_an_empty_key_file(home: Path) -> None:
    """A key file without a key is a fault that names the file."""
    (home / "var" / "api_key").write_text("\n")
    (fault,) = faults(home, API_KEY="")
    assert "api_key" in fault


def test_the_key_is_shown_nowhere(home: Path) -> None:
    """Neither the repr of the settings nor a fault contains the key, and no driver gets it."""
    secret = "a secret of some length"
    settings = loaded(home, {"API_KEY": secret})
    assert secret not in repr(settings)
    assert secret not in str({**settings.cores, **settings.systemd})
    assert not [fault for fault in faults(home, API_KEY=secret[:10], DEBUG="x") if secret[:10] in fault]


def test_a_secret_is_no_option() -> None:
    """Every user can list the options of processes: every setting but the key, the secret name and the proxy is one."""
    names = {str(row[0]) for row in Options.optParameters}
    assert names == {setting.option for setting in SETTINGS} - {"api-key", "door-name", "update-proxy"}
    assert not [name for name in names if name.replace("-", "") == "apikey"]


def test_options_by_setting() -> None:
    """Given options are known by the setting's name, the others are absent."""
    options = Options()
    options.parseOptions(["--rest-port", "1001", "--xray-splice=on"])
    assert options.settings() == {"REST_PORT": "1001", "XRAY_SPLICE": "on"}


def test_variables_of_systemd_are_passed_on(home: Path) -> None:
    """Only the variables for notifications are kept of the environment."""
    settings = loaded(home, {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1", "HOME": "/root"})
    assert settings.systemd == {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1"}


def test_keys_from_elsewhere(home: Path) -> None:
    """No key is needed if there is a file of named keys; a configured file must exist."""
    assert "there is no key" in faults(home, API_KEY="")[0]
    named = loaded(home, {"API_KEY": "", "API_KEYS_FILE": "keys"})
    assert (named.keys.key, named.keys.file, named.keys.required) == ("", home / "keys", True)
    (home / "var" / "api_keys").touch()
    there = loaded(home, {"API_KEY": ""})
    assert (there.keys.key, there.keys.file, there.keys.required) == ("", home / "var" / "api_keys", False)
    assert "fewer than" in faults(home, API_KEY="short")[0]


def test_the_file_of_the_key_is_remembered(home: Path) -> None:
    """Its permissions are checked later."""
    (home / "key").write_text(KEY)
    assert loaded(home, {"API_KEY": "", "API_KEY_FILE": "key"}).keys.key_file == home / "key"
    assert loaded(home, {"API_KEY_FILE": "key"}).keys.key_file is None


def test_certificates_of_clients(home: Path) -> None:
    """Certificates replace a key only with CLIENT_CA."""
    (home / "ca.pem").touch()
    beside = loaded(home, {"CLIENT_CA": "ca.pem"})
    assert (beside.door.client_ca, beside.keys.certified) == (home / "ca.pem", False)
    instead = loaded(home, {"CLIENT_CA": "ca.pem", "CLIENT_CERTIFICATE": "Instead", "API_KEY": ""})
    assert (instead.keys.certified, instead.keys.key) == (True, "")
    assert "CLIENT_CA" in faults(home, CLIENT_CA="missing.pem")[0]
    for key in (KEY, ""):
        assert "instead needs CLIENT_CA" in faults(home, CLIENT_CERTIFICATE="instead", API_KEY=key)[0]
    assert "there is no key" in faults(home, CLIENT_CA="ca.pem", API_KEY="")[0]
    assert loaded(home, {"TLS_MIN": "1.3"}).door.newest_tls


def test_strangers(home: Path) -> None:
    """Where they are turned away, the name is a host name, by default one made from the key; a decoy has an address."""
    key = "a secret of some length"
    for environ, name, decoy in (
        ({}, "auto", None),
        ({"STRANGERS": "Close"}, door_name(key), None),
        ({"STRANGERS": "close", "DOOR_NAME": "K3.example", "DECOY": "127.0.0.1:1"}, "k3.example", None),
        ({"STRANGERS": "decoy", "DECOY": "[::1]:443"}, door_name(key), ("::1", 443)),
    ):
        settings = loaded(home, {"API_KEY": key, **environ})
        assert (settings.door.name, settings.door.decoy) == (name, decoy)
        assert name == "auto" or name not in repr(settings)
    (home / "keys").write_text("")
    for bad, fault in (
        ({"STRANGERS": "hide"}, "STRANGERS: 'hide' is not one of"),
        ({"STRANGERS": "decoy"}, "DECOY is not set"),
        ({"STRANGERS": "decoy", "DECOY": "127.0.0.1"}, "DECOY: '127.0.0.1' is not HOST:PORT"),
        ({"STRANGERS": "decoy", "DECOY": "localhost:62051"}, "DECOY: 62051 is the node's own port"),
        ({"STRANGERS": "close", "DOOR_NAME": "a b"}, "DOOR_NAME: 'a b' is not a host name"),
        ({"STRANGERS": "close", "DOOR_NAME": "192.0.2.1"}, "DOOR_NAME: '192.0.2.1' is not a host name"),
        ({"STRANGERS": "close", "API_KEY": "", "API_KEYS_FILE": "keys"}, "DOOR_NAME: auto needs API_KEY"),
    ):
        assert [line[: len(fault)] for line in faults(home, **bad)] == [fault]


def test_settings_of_metrics(home: Path) -> None:
    """A port that no other setting has, and a switch."""
    settings = loaded(home, {"METRICS_PORT": "9550", "METRICS_USERS": "ON"})
    assert (settings.metrics.port, settings.metrics.users) == (9550, True)
    assert "METRICS_PORT: 62051 is already" in faults(home, METRICS_PORT="62051")[0]


@pytest.mark.parametrize("name", ["GEO_URL", "XRAY_DOWNLOAD_URL", "SING_BOX_DOWNLOAD_URL"])
def test_an_address_has_no_password(name: str, home: Path) -> None:
    """It would not be sent, but show in jobs that every key may read, in logs, and in the list of processes."""
    for address in ("https://user:sesame@127.0.0.1/there", "user:sesame@127.0.0.1", "ftp://sesame/"):
        [fault] = faults(home, **{name: address})
        assert fault.startswith(f"{name}: ") and "sesame" not in fault
    assert loaded(home, {name: "https://127.0.0.1:8080/@there"})
