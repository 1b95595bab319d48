"""scripts/install makes the service's user and group with the tools of different systems."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"
# Fakes of the tools, in a directory in place of the system: a user cannot join a missing group.
SHADOW = {
    "groupadd": '[ "$1" = --system ] && : >"group.$2"',
    "useradd": '[ "$2" = --gid ] && [ -e "group.$3" ] && echo "$3" >user.txnode',
}
BUSYBOX = {
    "addgroup": '[ "$1" = -S ] && : >"group.$2"',
    "adduser": 'while [ "$1" != -G ]; do shift; done; [ -e "group.$2" ] && echo "$2" >"user.$3"',
}


@pytest.mark.parametrize("there", ["nothing", "the user alone", "both"])
@pytest.mark.parametrize("tools", [SHADOW, BUSYBOX], ids=["shadow", "busybox"])
def test_the_user_and_its_group(tmp_path: Path, tools: dict[str, str], there: str) -> None:
    """Both exist at the end; a second run changes nothing, and completes an interrupted first run."""
    for name in {"nothing": [], "the user alone": ["user"], "both": ["user", "group"]}[there]:
        (tmp_path / f"{name}.txnode").write_text("txnode\n")
    known = {"id": '[ -e "user.$1" ]', "grep": "[ -e group.txnode ]"}
    for name, does in (tools | known).items():
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\n{does}\n")
        (tmp_path / name).chmod(0o755)
    for _ in range(2):
        run(tmp_path)
        assert (tmp_path / "group.txnode").exists() and (tmp_path / "user.txnode").read_text() == "txnode\n"


def run(system: Path) -> None:
    function = re.search(r"^make_user\(\) \{\n.*?^\}\n", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert function
    program = f"set -eu\nmanager=openrc state=/var/lib/txnode\n{function[0]}make_user\n"
    command = [shutil.which("sh") or "sh", "-c", program]
    subprocess.run(command, check=True, cwd=system, env={"PATH": str(system)}, capture_output=True)
