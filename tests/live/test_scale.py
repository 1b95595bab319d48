"""Very large rosters on the real core: users are added, kept, changed and removed, and no connection is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.service_pb2 import Proxy, User, Vless
from scripts.staging.controller import ControllerError, RpcController
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, daily, gets_in, member, stays_out
from tests.harness.grounds import SING_BOX, XRAY, Ground
from tests.live.test_nobody_dropped import at_ease, known_to_core, undisturbed

# Individual users: one never changes, one is added, one removed, one gets another id, one is changed alone.
ANNA, BERT, CARL, DORA, EVE = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl", "dora", "eve"))


def crowd(first: int, count: int, tags: Sequence[str], generation: int = 0) -> list[User]:
    """Users without a client; each generation has other ids."""
    return [
        User(
            email=f"{number}@crowd",
            proxies=Proxy(vless=Vless(id=f"{generation:08x}-0000-4000-8000-{number:012x}")),
            inbounds=tags,
        )
        for number in range(first, first + count)
    ]


@dataclass(frozen=True)
class Scene:
    """A running node, its inbounds, and a controller."""

    node: NodeProcess
    controller: RpcController
    places: Sequence[Place]
    echo: EchoServer

    @property
    def tags(self) -> list[str]:
        return [place.tag for place in self.places]

    @property
    def ends(self) -> Sequence[Place]:
        """The first inbound and the last."""
        return [*self.places[:1], *self.places[1:][-1:]]

    def everywhere(self, look: Callable[[Place, TestUser, EchoServer], bool], person: TestUser) -> None:
        """Whether the user can use the first inbound and the last."""
        for place in self.ends:
            assert look(place, person, self.echo), (person.email, place.tag, look.__name__)

    def has(self, users: Sequence[User]) -> None:
        """Whether the core has exactly these users on every inbound."""
        emails = {user.email for user in users}
        for place in self.places:
            assert known_to_core(self.node, place) == emails


SIZES = {
    "one inbound": (XRAY, 100_000, 1),
    "ten inbounds": (XRAY, 10_000, 10),
    # Every change needs a new run of this core, with all users.
    "sing-box": (SING_BOX, 10_000, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ground", "count", "inbounds"), daily([SIZES["ten inbounds"]], SIZES.values()), ids=SIZES)
def test_very_many_accounts(
    tmp_path: Path, all_kinds: Mapping[str, Kind], echo: EchoServer, ground: Ground, count: int, inbounds: int
) -> None:
    """A Start, the same Start again, a sync with changes, and one user alone.

    One connection lives through it all, or at least until a user is added.
    """
    places = [Place(all_kinds["vless-raw"], f"in-{number}", ground=ground) for number in range(inbounds)]
    with ExitStack() as stack:
        node = stack.enter_context(NodeProcess(tmp_path))
        scene = Scene(node, stack.enter_context(closing(RpcController(node))), places, echo)
        people = [member(person, *places) for person in (ANNA, CARL, DORA, EVE)]
        everybody = people + crowd(0, count - len(people), scene.tags)
        request = ground.backend([place.inbound for place in places], everybody)
        repeated(lambda: scene.controller.start(request))
        scene.has(everybody)
        for place in scene.ends:
            stack.enter_context(at_ease(node, place, ANNA, echo))
        with undisturbed(node, places[0], ANNA, echo):
            repeated(lambda: scene.controller.start(request))
        sync_with_changes(scene, count)
        one_alone(scene)


def repeated(call: Callable[[], object]) -> None:
    """Repeat a call, as controllers do, while the node replies in time that it is still at it: on a busy machine."""

    def taken() -> bool:
        try:
            call()
        except ControllerError as error:
            assert "the node continues in the background" in error.text, error.text
            return False
        return True

    until(taken, 60, "the call is replied to with success")


def sync_with_changes(scene: Scene, count: int) -> None:
    """One in a hundred has another id, some are added, some removed."""
    again = TestUser(DORA.email, TestUser.new("").uuid, DORA.password)
    scene.everywhere(gets_in, DORA)
    people = [member(person, *scene.places) for person in (ANNA, BERT, again, EVE)]
    changed = crowd(0, count // 100, scene.tags, generation=1)
    rest = crowd(count // 100, count - 2 * count // 100, scene.tags)
    fresh = crowd(2 * count, count // 100, scene.tags)
    everybody = [*people, *changed, *rest, *fresh]
    repeated(lambda: scene.controller.sync_users(everybody))
    scene.has(everybody)
    for person, look in ((BERT, gets_in), (CARL, stays_out), (again, gets_in), (DORA, stays_out)):
        scene.everywhere(look, person)


def one_alone(scene: Scene) -> None:
    """One of all these users is removed, and added again."""
    scene.everywhere(gets_in, EVE)
    repeated(lambda: scene.controller.sync_user(member(EVE)))
    scene.everywhere(stays_out, EVE)
    repeated(lambda: scene.controller.sync_user(member(EVE, *scene.places)))
    scene.everywhere(gets_in, EVE)
