"""The settings of the Xray driver, besides those that every driver has."""

from __future__ import annotations

from node.base.settings import Setting

SETTINGS = (
    Setting(
        "XRAY_ASSETS_PATH",
        "directory of geoip.dat and geosite.dat (default: the directory of the executable)",
        details="Set it if you keep these files elsewhere. Files that an update installed take precedence: see "
        "[updates.md](updates.md#geo-files).",
    ),
    Setting(
        "XRAY_SPLICE",
        "on or off: the kernel splices Vision connections, whose bytes are then counted only when they end",
        "off",
        choices=("on", "off"),
        details="Turn it on to save processor time if late counts do not matter: see [Splicing](#splicing).",
    ),
)
