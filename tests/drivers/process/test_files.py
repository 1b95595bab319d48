"""The settings that a core has, across processes of the node."""

from __future__ import annotations

from drivers.process.closed import numbers
from drivers.process.executable import OTHER_SETTINGS, Files


def packed_under(number: int) -> Files:
    """The next process's state of a core that was started under these settings."""
    before = Files(())
    before.under({"ABUSE": number, "PROXY_TO_SERVER": 7})
    assert not before.warnings
    return Files.unpacked(before.packed)


def test_settings_that_change() -> None:
    """Another node notices, also that they are set at all, or not any more; without them nothing is written."""
    for was, now in ((5, 5), (0, 0), (5, 6), (5, 0), (0, 6)):
        after = packed_under(was)
        after.under({"ABUSE": now, "PROXY_TO_SERVER": 7})
        assert after.warnings == ([OTHER_SETTINGS.format("ABUSE")] if was != now else [])
        again = Files.unpacked(after.packed)
        again.under({"ABUSE": was, "PROXY_TO_SERVER": 7})
        assert not again.warnings
    assert not Files(()).packed and len(packed_under(0).packed) == 1


def test_what_is_closed() -> None:
    """A core that an older node left closes nothing, whatever the next node's notes say; nor does one under `allow`."""
    old, default = Files.unpacked([]), numbers({})
    old.under(default)
    assert old.changed_settings == ["PROXY_TO_SERVER"]
    assert old.warnings == [OTHER_SETTINGS.format("PROXY_TO_SERVER")]
    old.under(numbers({"PROXY_TO_SERVER": "allow", "PROXY_INTERFACE": "eth0"}))
    assert not old.warnings
    new = Files(())
    new.under(default)
    again = Files.unpacked(new.packed)
    for settings in ({"PROXY_TO_SERVER": "rules"}, {"PROXY_TO_PRIVATE": "block"}, {"PROXY_INTERFACE": "eth0"}):
        again.under(numbers(settings))
        assert again.changed_settings == [*settings]
    again.under(default)
    assert not again.warnings
