"""Read a stream of log lines over gRPC as raw bytes, which takes next to no processor time from the measured node."""

from __future__ import annotations

import socket
import ssl
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from h2.connection import H2Connection
from h2.settings import SettingCodes

from node.api.methods import SERVICE

_HEADER, _DATA = 9, 0
# Timeout of connecting and the handshake.
_SECONDS = 10.0


@contextmanager
def log_stream(port: int, pem: str, headers: Mapping[str, str]) -> Iterator[ssl.SSLSocket]:
    """Open GetLogs with the largest flow-control windows. Yields the socket; the caller reads frames as bytes."""
    http = H2Connection()
    http.initiate_connection()
    http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
    http.increment_flow_control_window(2**31 - 1 - 65_535)
    names = {":method": "POST", ":scheme": "https", ":path": f"/{SERVICE.full_name}/GetLogs", ":authority": "localhost"}
    http.send_headers(1, [*names.items(), ("te", "trailers"), ("content-type", "application/grpc"), *headers.items()])
    http.send_data(1, bytes(5), end_stream=True)
    context = ssl.create_default_context(cadata=pem)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), _SECONDS) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as link,
    ):
        link.sendall(http.data_to_send())
        link.settimeout(None)
        yield link


def payloads(data: bytes) -> tuple[bytes, list[int], list[int]]:
    """The joined payload of the HTTP/2 DATA frames in `data`, and each frame's end in the payload and in `data`."""
    found, ends, places, at = bytearray(), list[int](), list[int](), 0
    while at + _HEADER <= len(data):
        end = at + _HEADER + int.from_bytes(data[at : at + 3], "big")
        if data[at + 3] == _DATA and end <= len(data):
            found += data[at + _HEADER : end]
            ends.append(len(found))
            places.append(end)
        at = end
    return bytes(found), ends, places


def arrived(place: int, ends: Sequence[int], places: Sequence[int], arrivals: Sequence[tuple[int, float]]) -> float:
    """When the payload up to `place` had arrived; `arrivals` are pairs of the total size received and the time."""
    whole = places[bisect_left(ends, place)]
    return arrivals[bisect_left(arrivals, (whole, 0.0))][1]
