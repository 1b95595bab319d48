"""The checks. To import this is to have them all in `tests.conformance.registry.CHECKS`, in the order of the report."""

from tests.conformance.checks import credentials, events, lifecycle, logs, routing, statistics, users

__all__ = ["credentials", "events", "lifecycle", "logs", "routing", "statistics", "users"]
