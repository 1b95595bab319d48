"""What the core says about a user to the node, the node says by the user's own name."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping

import pytest
from twisted.internet import reactor

from drivers.process.channel import ApiFailed
from drivers.sing_box.accounts import label
from drivers.sing_box.config import ApiAddress
from drivers.sing_box.ssm_api import DEADLINE, LiveUsers
from node.contract.counters import SEPARATOR

NAME = label(f"ann/x{SEPARATOR}0")


class Refusing(LiveUsers):
    """The client of a core that refuses everything, with the user's name."""

    async def _ask(
        self, method: bytes, url: str, body: Mapping[str, str] | None = None, seconds: float = DEADLINE
    ) -> tuple[int, bytes]:
        return (404 if method == b"PUT" and self.knows_nobody else 400), f"user {NAME} already exists".encode()

    knows_nobody = True


def reason(call: Coroutine[object, None, None]) -> str:
    with pytest.raises(ApiFailed) as failed:
        call.send(None)
    return str(failed.value)


@pytest.mark.parametrize("knows_nobody", [True, False])
def test_a_refusal(knows_nobody: bool) -> None:
    live = Refusing(reactor, ApiAddress(1, "secret", None, 2), ["in"])  # type: ignore[arg-type]
    live.knows_nobody = knows_nobody
    assert reason(live.let_in("in", NAME, "key")) == "user ann/x already exists"
    if not knows_nobody:
        assert reason(live.shut_out("in", NAME)) == "user ann/x already exists"
