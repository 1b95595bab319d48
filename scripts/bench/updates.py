"""Effect on users of updates of the core and of the geo files, valid and broken ones.

`python -m scripts.bench.updates [ROUNDS]` prints a table for each core. Each update is made ROUNDS times (3): how many
succeeded, the median duration of the job, live connections dropped around it, new connections, how many of them failed,
and the slowest; below, the final texts of the jobs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from drivers.install.install import version_of
from drivers.install.releases import CORES
from protos import service_pb2 as pb
from scripts.bench.overlap import TAG, on_sing_box, on_xray, working
from scripts.bench.stage import LIVE, Crowd, Stage, machine, stage
from scripts.staging.core import find_xray
from scripts.staging.mirror import Mirror, listing, release, renamed
from scripts.staging.ports import free_port
from scripts.staging.sing_box import find_sing_box
from scripts.staging.wait import until

ROUNDS = 3
USERS = 1000
# Seconds of traffic before and after each update, and the longest that one may take.
AROUND, LONGEST = 1.0, 90.0
# Versions that no release has: one that is the pinned core renamed, and broken ones.
NEW = {"xray": "26.3.28", "sing-box": "1.14.3"}
BROKEN = {
    "a core that does not start": "exit 3",
    "a core that dies on probation": '[ "$1" = run ] && [ "$2" != -test ] && '
    "( sleep 2; [ -e /proc/$$ ] && kill -9 $$ ) &",
}
FINDS = {"xray": find_xray, "sing-box": find_sing_box}
WRONG = hashlib.sha256(b"another").hexdigest()

# Asks the node for an update. Returns the job.
Update = Callable[[Stage], pb.Job]


class Round(NamedTuple):
    """One update: the job, its seconds, dropped and failed connections, and the seconds of new ones."""

    job: pb.Job
    took: float
    dropped: int
    failed: int
    opened: list[float]


def main(rounds: int) -> None:
    print(machine())
    print(f"{LIVE} live connections, {USERS:,} users, each update {rounds} times")
    for name in NEW:
        with Mirror() as mirror:
            urls = {
                "XRAY_DOWNLOAD_URL": mirror.url,
                "SING_BOX_DOWNLOAD_URL": mirror.url,
                "GEO_URL": f"{mirror.url}/geo",
            }
            with stage(UPDATES="on", **urls) as on:
                updates = {**of_core(name, mirror), **(of_lists(on, mirror) if name == "xray" else {})}
                measure(name, on, updates, rounds)
    print(machine())


def measure(name: str, on: Stage, updates: dict[str, Update], rounds: int) -> None:
    crowd, port = Crowd(USERS, [TAG]), free_port()
    on.controller.start(request(name, port, crowd))
    columns = ("done", "took s", "dropped", "new", "failed", "slowest ms")
    print(f"\n{CORES[name][0].title:<30} " + " ".join(f"{column:>10}" for column in columns))
    for update, ask in updates.items():
        row(update, [one(on, crowd, port, ask) for _ in range(rounds)])


def request(name: str, port: int, crowd: Crowd) -> pb.Backend:
    """A Start; Xray's has a rule with a geoip list."""
    made = (on_xray if name == "xray" else on_sing_box)(port, crowd, 0)
    if name == "xray":
        rule = {"ip": ["geoip:blocked"], "outboundTag": "new-0"}
        made.config = json.dumps({**json.loads(made.config), "routing": {"rules": [rule]}})
    return made


def one(on: Stage, crowd: Crowd, port: int, update: Update) -> Round:
    with working(on, crowd, port) as workers:
        time.sleep(AROUND)
        begun = time.monotonic()
        job = ended(on, update(on))
        took = time.monotonic() - begun
        time.sleep(AROUND)
        for worker in workers:
            worker.rest()
    dropped, failed = sum(len(each.dropped) for each in workers), sum(len(each.failed) for each in workers)
    return Round(job, took, dropped, failed, [opened.took for each in workers for opened in each.opened])


def row(update: str, rounds: list[Round]) -> None:
    done = f"{sum(each.job.state == 'done' for each in rounds)} of {len(rounds)}"
    took, opened = statistics.median(each.took for each in rounds), [each.opened for each in rounds]
    dropped, failed = sum(each.dropped for each in rounds), sum(each.failed for each in rounds)
    figures = f"{dropped:>10} {sum(map(len, opened)):>10,} {failed:>10} {1000 * max(map(max, opened)):>10.0f}"
    print(f"{update:<30} {done:>10} {took:>10.1f} {figures}", flush=True)
    for text in sorted({each.job.text for each in rounds}):
        print(f"{'':>4}{text[:150]}")


def ended(on: Stage, job: pb.Job) -> pb.Job:
    def now() -> pb.Job:
        return on.controller.call("GetJob", pb.Jobs, pb.JobRequest(id=job.id)).jobs[0]

    until(lambda: now().state in ("done", "failed"), LONGEST, "the update ends")
    return now()


def of_core(name: str, mirror: Mirror) -> dict[str, Update]:
    kind, known = (pb.XRAY if name == "xray" else pb.SING_BOX), version_of(CORES[name][0], FINDS[name]())
    head, _, tail = NEW[name].rpartition(".")

    def offer(number: int, before: str = "") -> tuple[str, str]:
        version = f"{head}.{int(tail) + number}"
        return version, mirror.put(*release(name, version, renamed(FINDS[name](), known, version, before)))

    def asking(version: str, digest: str) -> Update:
        asked = pb.UpdateCoreRequest(type=kind, version=version, sha256=digest)
        return lambda on: on.controller.call("UpdateCore", pb.Job, asked)

    def forth_and_back(on: Stage) -> pb.Job:
        return next(turns)(on)

    def back(on: Stage) -> pb.Job:
        return on.controller.call("UpdateCore", pb.Job, pb.UpdateCoreRequest(type=kind, back=True))

    # The first round updates, as there is nothing to go back to; later ones go back.
    turns = itertools.chain([asking(*offer(0))], itertools.repeat(back))
    wrong = {what: asking(*offer(number, before)) for number, (what, before) in enumerate(BROKEN.items(), 1)}
    digest = asking(offer(3)[0], WRONG)
    return {"another core, and back": forth_and_back, "a core of another digest": digest, **wrong}


def of_lists(on: Stage, mirror: Mirror) -> dict[str, Update]:
    """Updates of the geo files. Installs the first ones right away."""
    mirror.put("/geo/geosite.dat", b"")
    hosts = (listing(private="10.0.0.0/8", blocked=f"203.0.113.{number}/32") for number in itertools.count())

    def asking(contents: Iterable[bytes], digest: str = "") -> Update:
        def ask(on: Stage) -> pb.Job:
            found = mirror.put("/geo/geoip.dat", next(iter(contents)))
            mirror.put("/geo/geoip.dat.sha256sum", f"{digest or found}  geoip.dat\n".encode())
            asked = pb.UpdateGeoFilesRequest(files=[pb.GeoFile(name="geoip.dat")])
            return on.controller.call("UpdateGeoFiles", pb.Job, asked)

        return ask

    newer = asking(hosts)
    ended(on, newer(on))
    without = (listing(private=f"10.{number}.0.0/16") for number in itertools.count())
    return {
        "newer lists": newer,
        "lists of another digest": asking(hosts, WRONG),
        "lists without what is named": asking(without),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
