"""Sites of the REST interface, with connections of their own."""

from __future__ import annotations

from typing import Any

from node.api.auth import Authenticator
from node.door.connections import Connections, Limits
from node.door.site import Site


def site_of(
    resource: Any, authenticator: Authenticator, reactor: Any, limits: Limits | None = None, log_requests: bool = False
) -> Site:
    """A site that serves this resource within these limits."""
    return Site(resource, authenticator, Connections(reactor, limits or Limits(), authenticator.lets_in), log_requests)
