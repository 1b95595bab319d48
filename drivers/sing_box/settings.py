"""The settings of the sing-box driver."""

from __future__ import annotations

from drivers.install.releases import SING_BOX
from drivers.process.settings import download_setting, executable_setting

SETTINGS = (executable_setting(SING_BOX), download_setting(SING_BOX))
