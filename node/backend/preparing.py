"""Has a core parse configurations: the checks that can refuse a Start before anything is changed."""

from __future__ import annotations

from node.backend.desired import Accepted, Fingerprint, without_users
from node.base.errors import InvalidConfig
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.driver import Driver
from node.contract.routing import Routing
from protos.service_pb2 import Backend

# Bytes that a configuration may have, and characters above which it is parsed in the reactor's thread pool.
MAX_CONFIG = 8 * 1024**2
READ_INLINE = 64 * 1024


async def fingerprint_of(reactor: PooledReactor, driver: Driver, request: Backend) -> Fingerprint:
    """Return a key that equal backends share. Raises `InvalidConfig` for a configuration that is too long."""
    config = request.config
    if len(config) <= READ_INLINE:
        meaning = driver.fingerprint(config)
    elif len(config.encode()) > MAX_CONFIG:
        raise InvalidConfig(f"the configuration is longer than {MAX_CONFIG // 1024**2} MiB")
    else:
        meaning = await in_pool(reactor, driver.fingerprint, config)
    return driver.name, meaning, frozenset(request.exclude_inbounds)


async def prepare(driver: Driver, request: Backend, fingerprint: Fingerprint, routing: Routing) -> Accepted:
    """Have the core parse a backend's configuration. Raises as `Driver.prepare` and `Accepted.with_routing`."""
    version = await driver.version()
    plan = await driver.prepare(request.config, frozenset(request.exclude_inbounds))
    accepted = Accepted(without_users(request), request.keep_alive, driver, plan, version, fingerprint)
    return await accepted.with_routing(routing)


async def prepare_again(reactor: PooledReactor, accepted: Accepted, request: bytes, routing: Routing) -> Accepted:
    """Prepare another backend of the same driver; it is the accepted one without a `request`, or if it means the same.

    Raises as `prepare`.
    """
    if request:
        asked = Backend.FromString(request)
        fingerprint = await fingerprint_of(reactor, accepted.driver, asked)
        if fingerprint != accepted.fingerprint:
            return await prepare(accepted.driver, asked, fingerprint, routing)
    return accepted if accepted.routing == routing else await accepted.with_routing(routing)
