"""What a node warns of."""

from __future__ import annotations

from protos.service_pb2 import BaseInfoResponse

# The Xray that the tests run is old; a newer one has more to say of how they use it.
_USUAL = ("safer core", "trustedXForwardedFor", "minClientVer")


def warned(info: BaseInfoResponse) -> list[str]:
    """All of it, but for what tests have to expect of the Xray that they run."""
    return [warning for warning in info.warnings if not any(usual in warning for usual in _USUAL)]
