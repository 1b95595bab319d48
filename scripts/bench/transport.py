"""The floor of a call: a server that replies with fixed bytes. `sides` runs it as a process.

`python -m scripts.bench.transport grpc|rest PORT CERTIFICATE KEY REPLIES`; REPLIES is a JSON file of hexadecimal
replies by method name or path. Over gRPC, GetLogs sends the lines of standard input to each reader, one a message.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

# The node's settings of gRPC, so that the remaining difference is the node's own cost.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ["GRPC_EXPERIMENTS"] = "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints"

import grpc
import grpc.aio
from twisted.internet import endpoints, reactor
from twisted.web.resource import Resource
from twisted.web.server import Site

_FEEDS = ("SyncUser", "SyncUsersChunked")
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_PIECE = 65_536


class Answers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, replies: dict[str, bytes]) -> None:
        self._replies = replies
        self._readers: list[asyncio.Queue[list[bytes]]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = handler_call_details.method.rpartition("/")[2]
        reply = self._replies.get(name, b"")

        async def answer(_: bytes, __: object) -> bytes:
            return reply

        async def consume(messages: AsyncIterator[bytes], _: object) -> bytes:
            async for _message in messages:
                pass
            return reply

        if name == "GetLogs":
            return grpc.unary_stream_rpc_method_handler(self._log)
        return (
            grpc.stream_unary_rpc_method_handler(consume)
            if name in _FEEDS
            else grpc.unary_unary_rpc_method_handler(answer)
        )

    async def _log(self, _: bytes, context: Any) -> None:
        queue: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._readers.append(queue)
        while True:
            for line in await queue.get():
                await context.write(line)

    async def read(self) -> None:
        """Send each line of standard input to every reader as a message."""
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
        rest = b""
        while piece := await stream.read(_PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            messages = [_log_message(line) for line in lines]
            for queue in self._readers:
                queue.put_nowait(messages)


def _log_message(line: bytes) -> bytes:
    """Encode `Log.detail` by hand: this process imports none of the node's modules."""
    length = len(line)
    size = bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
    return b"\x0a" + size + line


async def serve_grpc(port: int, certificate: bytes, key: bytes, replies: dict[str, bytes]) -> None:
    answers = Answers(replies)
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((answers,))
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    await answers.read()
    await server.wait_for_termination()


class Page(Resource):
    isLeaf = True  # noqa: N815 - twisted.web's name

    def __init__(self, replies: dict[str, bytes]) -> None:
        super().__init__()
        self._replies = replies

    def render(self, request: Any) -> bytes:
        request.content.read()
        return self._replies.get(request.path.decode(), b"")


def serve_rest(port: int, certificate: str, key: str, replies: dict[str, bytes]) -> None:
    where = f"ssl:{port}:interface=127.0.0.1:certKey={certificate}:privateKey={key}"
    endpoints.serverFromString(reactor, where).listen(Site(Page(replies)))
    reactor.run()


def main(protocol: str, port: str, certificate: str, key: str, file: str) -> None:
    replies = {name: bytes.fromhex(text) for name, text in json.loads(Path(file).read_text()).items()}
    if protocol == "grpc":
        asyncio.run(serve_grpc(int(port), Path(certificate).read_bytes(), Path(key).read_bytes(), replies))
    else:
        serve_rest(int(port), certificate, key, replies)


if __name__ == "__main__":
    main(*sys.argv[1:])
