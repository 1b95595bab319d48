"""A small controller: python controller.py HOST PORT KEY_FILE CERTIFICATE [rest|grpc]"""

import json
import sys
import uuid
from pathlib import Path

from twisted.internet.task import react

from node.base.errors import UsersRefused
from node.client import Target, connect
from protos import service_pb2 as pb

CONFIG = {
    "inbounds": [
        {
            "tag": "in",
            "listen": "127.0.0.1",
            "port": 21443,
            "protocol": "vless",
            "settings": {"clients": [], "decryption": "none"},
        }
    ],
    "outbounds": [{"tag": "direct", "protocol": "freedom"}],
}


def user(name, *inbounds):
    """A user in these inbounds. Without any it removes the user."""
    identity = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
    return pb.User(email=name, proxies=pb.Proxy(vless=pb.Vless(id=identity)), inbounds=inbounds)


async def main(reactor, host, port, key, certificate, transport="rest"):
    target = Target(transport, host, int(port), Path(key), Path(certificate))
    async with connect(reactor, target, deadline=20) as node:
        # Safe to repeat: an equal Start disconnects no user.
        backend = pb.Backend(type=pb.XRAY, config=json.dumps(CONFIG), users=[user("alice", "in")])
        info = await node.start(backend)
        print("started", info.core_type, info.state)

        await node.sync_user(user("bob", "in"))
        try:
            await node.sync_user(user("a>>>b", "in"))
        except UsersRefused as error:
            print("refused", error.code)
        await node.sync_user(user("bob"))
        for row in (await node.list_users()).users:
            print("user", row.name)

        # Each byte is in exactly one reply with reset: add them up.
        for row in (await node.stats(pb.UsersStat, reset=True)).stats:
            print("bytes", row.name, row.type, row.value)

        # Keep `sequence` and `epoch` of the last event, and go on after it next time.
        async with node.events(kinds=["backend"], follow=False) as events:
            async for event in events:
                last = event
        print("event", last.kind)
        async with node.logs() as log:
            async for line in log:
                print("log", line.partition(" ")[0])
                break

        await node.stop()
        print("stopped", (await node.info()).state)


react(main, sys.argv[1:])
