"""Make a client's target of a profile: the address, the trusted certificate and the key."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from node.client import Target
from node.nodectl.exits import Unusable
from node.nodectl.profiles import Profile

KEY = "NODECTL_KEY"


def target_of(profile: Profile, environ: Mapping[str, str]) -> Target:
    """The target to call this node. Raises `Unusable`."""
    target = Target(
        profile.transport,
        profile.address,
        profile.port,
        key=_key(profile, environ),
        trust=None if profile.certificate is None else _text(profile, profile.certificate),
        certificate_name=profile.certificate_name,
    )
    try:
        target.certificates()
    except ValueError as error:
        raise Unusable(f"{profile.name}: {profile.certificate} is not a certificate: {error}")
    return target


def _key(profile: Profile, environ: Mapping[str, str]) -> str:
    """The key: from the profile's file, else from the environment, else from the local node's settings."""
    if profile.key_file is not None:
        _require_closed(profile, profile.key_file)
        return _text(profile, profile.key_file).strip()
    if key := environ.get(KEY, "").strip() or profile.key:
        return key
    raise Unusable(f"{profile.name}: no key: set key_file in the nodes file, or {KEY} in the environment")


def _require_closed(profile: Profile, file: Path) -> None:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise Unusable(f"{profile.name}: the key file cannot be read: {error}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Unusable(f"{profile.name}: other users can read the key in {file}: chmod 600 {file}")


def _text(profile: Profile, file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{profile.name}: {file} cannot be read: {error}")
