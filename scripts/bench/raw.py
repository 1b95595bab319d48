"""A stream of log lines over gRPC, read as bytes: it takes next to no processor time from those it is measured with."""

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
# For the handshake.
_SECONDS = 10.0


@contextmanager
def log_stream(port: int, pem: str, headers: Mapping[str, str]) -> Iterator[ssl.SSLSocket]:
    """A stream of log lines to a reader whose windows are never full, and who looks at nothing."""
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
    """What HTTP/2's DATA frames hold in bytes from a server; where each ends there, and where it does in all."""
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
    """When the byte before this place of the payload was there; `arrivals` are sizes of all that was, with the time."""
    whole = places[bisect_left(ends, place)]
    return arrivals[bisect_left(arrivals, (whole, 0.0))][1]
