"""HTTP/1.1 fuzzer: almost valid requests of all shapes, several at once, and bodies in all framings."""

from __future__ import annotations

import re
from random import Random

from node.api.methods import METHODS
from scripts.attack.link import linked, talk
from scripts.attack.messages import body
from scripts.attack.mutate import mutated, pieces
from scripts.staging.node import NodeProcess

# Statuses that the node must never send. Its other 5xx explain what the core lacks.
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_NEVER = {b"502", b"504", b"505"}
_INTERNAL = b"internal error"

_VERBS = (b"GET", b"PUT", b"POST", b"DELETE", b"HEAD", b"OPTIONS", b"CONNECT", b"TRACE", b"PRI", b"", b"G\0T", b"get")
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 x", b"", b"\xff")
_PATHS = (
    b"/",
    b"*",
    b"http://x/info",
    b"/../../etc/passwd",
    b"/%",
    b"/%ff",
    b"/info?" + b"a" * 20_000,
    b"//",
    b"/\xff",
)
_HEADERS = (
    b"Host: x",
    b"Host: \xff",
    b"Content-Length: -1",
    b"Content-Length: +1",
    b"Content-Length: 0x10",
    b"Content-Length: " + b"9" * 5000,
    b"Content-Length: 99999999999",
    b"Content-Length: 1, 2",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding : chunked",
    b"Expect: 100-continue",
    b"Connection: close, keep-alive",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"Upgrade: websocket",
    b"Content-Type: \xff\xfe",
    b"Content-Encoding: gzip",
    b"Range: bytes=0-0,-1",
    b"Authorization: Bearer",
    b"Authorization: Bearer \xff",
    b"X-API-Key:",
    b" folded",
    b"\tfolded",
    b":",
    b"no colon",
    b"\0: \0",
    b"Cookie: " + b"a=b; " * 2000,
    b"X: " + b"x" * 15_000,
    b"X: " + b"x" * 70_000,
)
_CHUNKS = (b"-1", b"0x5", b"5;ext=\xff", b"ffffffffffffffff", b"", b" 5", b"5 ", b"g", b"0" * 5000 + b"5")


def attack(node: NodeProcess, random: Random) -> None:
    """One connection with a few pipelined requests."""
    text = b"".join(request(node.key, random) for _ in range(random.choice((1, 1, 2, 5))))
    if random.random() < 0.5:
        text = mutated(text, random)
    with linked(node, random.choice((node.rest_port, node.grpc_port)), "http/1.1") as link:
        check(talk(link, pieces(text, random)), text)


def check(answer: bytes, cause: bytes) -> None:
    wrong = _NEVER & set(_STATUS.findall(answer))
    assert not wrong and _INTERNAL not in answer, f"{answer[:1000]!r} for {cause[:4000]!r}"


def request(key: str, random: Random) -> bytes:
    method = random.choice(METHODS)
    verb, path = random.choice(method.verbs).encode(), method.path.encode()
    if random.random() < 0.2:
        verb = random.choice(_VERBS)
    if random.random() < 0.2:
        path = random.choice((*_PATHS, path + b"/", path + b"?x=%00", path.upper()))
    version = random.choice(_VERSIONS) if random.random() < 0.2 else b"HTTP/1.1"
    head, content = framed(body(method, random), random)
    headers = [*head, *random.choices(_HEADERS, k=random.choice((0, 0, 1, 3)))]
    if random.random() < 0.02:
        headers += [b"X-%d: y" % number for number in range(random.choice((100, 600, 5000)))]
    if random.random() < 0.8:
        headers.append(random.choice((b"Authorization: Bearer %b", b"X-API-Key: %b")) % key.encode())
    random.shuffle(headers)
    end = random.choice((b"\r\n",) * 9 + (b"\n",))
    return end.join((b" ".join((verb, path, version)), *headers, b"", b"")) + content


def framed(content: bytes, random: Random) -> tuple[list[bytes], bytes]:
    """A body's headers and its framed bytes."""
    kind = b"Content-Type: application/x-protobuf"
    if random.random() < 0.5:
        length = len(content) + (random.choice((-1, 1, 1000)) if random.random() < 0.1 else 0)
        return [kind, b"Content-Length: %d" % length], content
    return [kind, b"Transfer-Encoding: chunked"], b"".join(chunks(content, random))


def chunks(content: bytes, random: Random) -> list[bytes]:
    size = random.choice((1, 7, 1000, 100_000))
    cut = [content[at : at + size] for at in range(0, min(len(content), 50 * size), size)]
    parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in cut]
    if random.random() < 0.3:
        parts.insert(random.randrange(len(parts) + 1), random.choice(_CHUNKS) + b"\r\nhello\r\n")
    return [*parts, random.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"0\r\n", b""))]
