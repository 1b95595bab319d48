"""What an operator says of Xray."""

from __future__ import annotations

from drivers.install.releases import XRAY
from drivers.process.settings import download_setting, executable_setting
from node.contract.settings import Setting

SETTINGS = (
    executable_setting(XRAY),
    download_setting(XRAY),
    Setting("XRAY_ASSETS_PATH", "where geoip.dat and geosite.dat are (default: beside the executable)"),
    Setting(
        "XRAY_SPLICE",
        "on: the kernel splices Vision connections, which are counted only at their end",
        "off",
        choices=("on", "off"),
    ),
)
