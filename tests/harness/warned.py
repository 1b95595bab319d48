"""What a node warns of."""

from __future__ import annotations

from protos.service_pb2 import BaseInfoResponse


def warned(info: BaseInfoResponse) -> list[str]:
    """All of it, but for the age of the Xray that the tests run."""
    return [warning for warning in info.warnings if "safer core" not in warning]
