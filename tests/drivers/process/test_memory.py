"""Values of CORE_MEMORY."""

from __future__ import annotations

import pytest

from drivers.process.settings import fault_of_memory, memory_amount, memory_limit, soft_limit


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("512M", 512 * 1024**2), ("2g", 2 * 1024**3), ("300000000", 300_000_000), ("50%", 500), ("x", None), ("-1", None)],
)
def test_amounts(text: str, bytes_: int | None) -> None:
    assert memory_amount(text, 1000) == bytes_


@pytest.mark.parametrize("text", ["1M", "0%", "much", "1.5G", "10 %", "\u0661G"])
def test_invalid_values(text: str) -> None:
    assert fault_of_memory(text)


def test_the_soft_limit_of_the_run_time() -> None:
    assert not fault_of_memory("1G")
    assert memory_limit("") is None
    assert soft_limit(None) == {}
    assert 0.8 * 1024**3 < int(soft_limit(memory_limit("1G"))["GOMEMLIMIT"]) < 1024**3
