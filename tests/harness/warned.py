"""The warnings of a node."""

from __future__ import annotations

from protos.service_pb2 import BaseInfoResponse

# The tests run an old Xray; newer ones cause further warnings about its use.
_USUAL = ("safer core", "trustedXForwardedFor", "minClientVer")


def warned(info: BaseInfoResponse) -> list[str]:
    """The warnings, without those that depend on the tested version of Xray."""
    return [warning for warning in info.warnings if not any(usual in warning for usual in _USUAL)]
