"""Files that a sing-box configuration names in unobvious ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivers.process.paths import Paths
from drivers.sing_box.allowlist import touched
from node.base.errors import InvalidConfig


def plugged(options: str) -> dict[str, Any]:
    return {"outbounds": [{"type": "shadowsocks", "plugin": "v2ray-plugin", "plugin_opts": options}]}


@pytest.mark.parametrize(
    "options", ["cert={}", "tls;cert={};host=a", r"tls;c\ert={}", "cert={};cert=/etc/ssl/certs/a.pem"]
)
def test_an_option_of_a_plugin_names_a_file(tmp_path: Path, options: str) -> None:
    """It is parsed as the core does; if the file is allowed, the core may read it."""
    made, allowed = plugged(options.format(tmp_path / "a.pem")), tmp_path.resolve()
    assert str(tmp_path / "a.pem") in touched(made, Paths((allowed, Path("/etc/ssl/certs"))), None).files
    with pytest.raises(InvalidConfig, match=r"outbounds\[0\]\.plugin_opts, cert: .*CORE_PATHS"):
        touched(made, Paths(), None)


@pytest.mark.parametrize("options", ["", "tls;host=cert", "mode=quic;certRaw=x", "\\", "cert", ";;=;"])
def test_an_option_without_a_file(options: str) -> None:
    assert not touched(plugged(options), Paths(), None).files


@pytest.mark.timeout(10)
def test_long_options() -> None:
    touched(plugged("a" * 1_000_000 + "\\"), Paths(), None)
    touched(plugged("\\a" * 500_000 + "\\"), Paths(), None)


def test_a_path_with_a_variable(tmp_path: Path) -> None:
    """The core replaces `$NAME` by its environment, and would read another file than the node checked."""
    named = f"{tmp_path}/.${{U}}./.${{U}}./shadow"
    for made in (
        {"dns": {"servers": [{"type": "hosts", "path": [named]}]}},
        {"outbounds": [{"type": "ssh", "private_key_path": named}]},
    ):
        with pytest.raises(InvalidConfig, match=r"contains a \$"):
            touched(made, Paths((tmp_path.resolve(),)), None)
