"""The checks. Importing this registers all of them in `tests.conformance.registry.CHECKS`, in report order."""

from tests.conformance.checks import credentials, events, lifecycle, logs, routing, statistics, updates, users

__all__ = ["credentials", "events", "lifecycle", "logs", "routing", "statistics", "updates", "users"]
