"""Cost of a scrape: time, processor time of the node, size. `python -m scripts.bench.metrics [USERS ...]`

Scrapes are further apart than the node caches a page. Every user has a traffic total in the state file.
"""

from __future__ import annotations

import http.client
import ssl
import statistics
import sys
import time
from collections.abc import Iterable

from node.contract.counters import Row, Scope
from node.contract.saved import Changes
from node.metrics.pages import FRESH
from node.state.database import Database
from scripts.bench.stage import Backing, Stage, backing, machine, stage
from scripts.staging.target import credentials

SIZES = (1_000, 10_000)
ROUNDS = 8
ACCEPT = {"text": "text/plain", "OpenMetrics": "application/openmetrics-text"}


def main(sizes: Iterable[int]) -> None:
    print(machine())
    print(f"{'':36} {'ms':>6} {'longest':>8} {'node CPU':>9} {'KiB':>7}")
    for size in sizes:
        for users in ("off", "on"):
            with stage(METRICS_USERS=users) as on:
                target = backing(size)
                seed(on, target)
                on.controller.start(target.request())
                for form, accept in ACCEPT.items():
                    measure(on, f"{size} users, METRICS_USERS={users}, {form}", accept)
                on.controller.stop()


def seed(on: Stage, target: Backing) -> None:
    """Write a traffic total for each user into the state file; restarts the node."""
    on.node.stop()
    rows = (Row(Scope.USER, user.email, 1_000_000, 20_000_000) for user in target.crowd.users)
    database = Database(on.node.state / "state.db")
    database.load()
    database.write(Changes(totals={(row.scope, row.key): row for row in rows}))
    database.close()
    on.node.start()


def measure(on: Stage, name: str, accept: str) -> None:
    link = http.client.HTTPSConnection(
        on.node.host, on.node.rest_port, context=ssl.create_default_context(cadata=on.node.pem)
    )
    headers = {**credentials(on.node.key, "bearer"), "Accept": accept}
    sizes: list[int] = []

    def scrape() -> None:
        link.request("GET", "/metrics", headers=headers)
        sizes.append(len(link.getresponse().read()))

    scrape()
    costs = []
    for _ in range(ROUNDS):
        time.sleep(FRESH * 1.1)
        costs.append(on.measure(scrape))
    link.close()
    walls = [1000 * cost.wall for cost in costs]
    # Processor time has a resolution of 10 ms: the mean is more precise than the median.
    processor = 1000 * statistics.mean(cost.node for cost in costs)
    figures = f"{statistics.median(walls):>6.1f} {max(walls):>8.1f} {processor:>6.0f} ms {sizes[-1] / 1024:>7.0f}"
    print(f"{name:36} {figures}", flush=True)


if __name__ == "__main__":
    main(map(int, sys.argv[1:]) if sys.argv[1:] else SIZES)
