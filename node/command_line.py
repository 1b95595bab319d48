"""The command line of `twistd node`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from twisted.python.usage import Options as UsageOptions
from twisted.python.usage import UsageError

from drivers.registry import DRIVER_SETTINGS
from node.settings import all_settings

SETTINGS = all_settings(DRIVER_SETTINGS)


class Options(UsageOptions):
    """The command line: an option for every setting that is not secret. The environment and `.env` have them, too."""

    synopsis = "[options]"
    longdesc = (
        "Runs a proxy core for a controller that calls over REST or gRPC. The node reads settings from .env in the "
        "working directory, the environment and these options; a later source overrides an earlier one. Brackets have "
        "a setting's name and default; docs/settings.md says when to change it. API_KEY and UPDATE_PROXY may hold "
        "secrets, and other users can read options: set these two in .env or in the environment."
    )
    optParameters = [  # noqa: N815, RUF012 - Twisted's form
        [setting.option, None, None, f"{setting.text} [{setting.name}={setting.default}]"]
        for setting in SETTINGS
        if not setting.secret
    ]

    optFlags = [["check", None, "print whether this version could take over from a running node, and exit"]]  # noqa: N815, RUF012

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse the options; refuse abbreviations, which Twisted allows.

        `--api-key=…` would be one, and show the key to every user of the machine.
        """
        words = list(sys.argv[1:] if options is None else options)
        for name in (word.partition("=")[0] for word in words if word.startswith("--")):
            if name[2:] not in self._names():
                raise UsageError(f"there is no option {name}")
        super().parseOptions(words)

    def _names(self) -> set[str]:
        """The names of all options, spelled in full."""
        return {option.rstrip("=") for option in self.longOpt}

    def settings(self) -> dict[str, str]:
        """The values given on the command line, by setting name."""
        given = {setting.name: self.get(setting.option) for setting in SETTINGS}
        return {name: value for name, value in given.items() if value is not None}
