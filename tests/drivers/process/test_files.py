"""The settings of abuse that a core has, across processes of the node."""

from __future__ import annotations

from drivers.process.executable import OTHER_SETTINGS, Files


def packed_under(number: int) -> Files:
    """The next process's state of a core that was started under these settings."""
    before = Files(())
    before.under(number)
    assert not before.warnings
    return Files.unpacked(before.packed)


def test_settings_that_change() -> None:
    """Another node notices, also that they are set at all, or not any more; without them nothing is written."""
    for was, now in ((5, 5), (0, 0), (5, 6), (5, 0), (0, 6)):
        after = packed_under(was)
        after.under(now)
        assert after.warnings == ([OTHER_SETTINGS] if was != now else [])
        again = Files.unpacked(after.packed)
        again.under(was)
        assert not again.warnings
    assert not Files(()).packed and not packed_under(0).packed
