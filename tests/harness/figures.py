"""Parse a metrics page as Prometheus does."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(page: str) -> Series:
    """The value of each series, by name and sorted labels. Raises `ValueError` for an invalid page."""
    families = openmetrics(page) if page.endswith("# EOF\n") else text(page)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(page: str, name: str, **labels: str) -> float:
    """The value of one series. Raises `KeyError` if it is absent."""
    return series(page)[name, tuple(sorted(labels.items()))]
