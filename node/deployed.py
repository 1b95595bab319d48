"""Settings of other deployed nodes that this node ignores; an operator may bring a `.env` with them along. Pure.

Settings that this node shares with them have the same name and meaning, and are in `node.settings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# By node and setting: the setting of this node that does the same, if there is one.
_PASARGUARD = {
    "GENERATED_CONFIG_PATH": "",
    "STARTUP_LOG_TAIL_SIZE": "",
    "STATS_UPDATE_INTERVAL_SECONDS": "TRAFFIC_INTERVAL",
    "STATS_CLEANUP_INTERVAL_SECONDS": "",
    "PG_NODE_WG_HOST_ROUTING": "",
    "PG_NODE_WG_NAT_OUTPUT_INTERFACE": "",
    "PG_NODE_WG_NAT_EGRESS_ONLY": "",
    "LATENCY_TEST_URL": "",
    "LATENCY_TIMEOUT_SECONDS": "",
    "MAX_LOG_PER_REQUEST": "",
    "WEBAPP_HOST": "NODE_HOST",
}
_MARZBAN = {
    "SERVICE_HOST": "NODE_HOST",
    "SSL_CLIENT_CERT_FILE": "CLIENT_CA",
    "XRAY_API_HOST": "",
    "XRAY_API_PORT": "",
}
_MARZNODE = {
    "SERVICE_ADDRESS": "NODE_HOST",
    "INSECURE": "",
    "AUTH_GENERATION_ALGORITHM": "",
    "XRAY_ENABLED": "",
    "XRAY_CONFIG_PATH": "",
    "XRAY_VLESS_REALITY_FLOW": "",
    "XRAY_RESTART_ON_FAILURE": "",
    "XRAY_RESTART_ON_FAILURE_INTERVAL": "",
    "HYSTERIA_ENABLED": "",
    "HYSTERIA_EXECUTABLE_PATH": "",
    "HYSTERIA_CONFIG_PATH": "",
    "SING_BOX_ENABLED": "",
    "SING_BOX_CONFIG_PATH": "",
    "SING_BOX_RESTART_ON_FAILURE": "",
    "SING_BOX_RESTART_ON_FAILURE_INTERVAL": "",
    "SING_BOX_USER_MODIFICATION_INTERVAL": "",
}
_REMNAWAVE = {
    "NODE_PORT": "SERVICE_PORT",
    "APP_PORT": "SERVICE_PORT",
    "SECRET_KEY": "API_KEY",
    "SSL_CERT": "SSL_CERT_FILE",
    "CUSTOM_CORE_URL": "XRAY_EXECUTABLE_PATH",
    "DISABLE_HASHED_SET_CHECK": "",
    "XTLS_API_PORT": "",
}
OWNERS: Mapping[str, Mapping[str, str]] = {
    "PasarGuard node": _PASARGUARD,
    "Marzban-node": _MARZBAN,
    "marznode": _MARZNODE,
    "Remnawave node": _REMNAWAVE,
}
NAMES: Mapping[str, str] = {name: like for names in OWNERS.values() for name, like in names.items()}


def ignored(sources: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the ignored names that the operator has set, in the order of the list above."""
    there = {name for source in sources for name in NAMES.keys() & source.keys() if source[name].strip()}
    return tuple(name for name in NAMES if name in there)


def described(names: Iterable[str]) -> str:
    """Format the names for a log line, each with this node's setting for the same."""
    return ", ".join(f"{name} (here {NAMES[name]})" if NAMES[name] else name for name in names)
