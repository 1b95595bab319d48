"""What a configuration says of who comes by its inbounds."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.sing_box import listening


@pytest.mark.parametrize(
    ("more", "shared"),
    [
        ({}, False),
        ({"transport": {"type": "ws"}}, False),
        ({"transport": {"type": "grpc"}}, True),
        ({"fallback": {"server": "127.0.0.1", "server_port": 80}}, True),
        ({"fallback_for_alpn": {"h2": {"server": "127.0.0.1", "server_port": 80}}}, True),
    ],
)
def test_a_connection_may_be_of_others_than_one_user(more: dict[str, Any], shared: bool) -> None:
    """Where it can carry many requests, and where it may be led to somebody else."""
    inbound = {"type": "trojan", "tag": "in", "listen": "::", "listen_port": 443, **more}
    assert listening.shared({"inbounds": [inbound]}) == ({"in"} if shared else set())
