"""The node's log as lines of JSON, for log collectors: one line for each event."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from twisted.logger import FileLogObserver, ILogObserver, LogEvent, formatEvent
from twisted.python.components import Componentized
from twisted.python.logfile import LogFile

Soon = Callable[[Callable[[], object]], object]

# Keys of an event that are not its fields: Twisted's own, and those of its legacy log.
_FRAME = frozenset(("message", "time", "system", "format", "isError", "why", "failure", "printed"))
# Bits of a number; Python refuses to convert very long ones to text.
_BITS = 256
# Characters of a text or a traceback.
MAX_TEXT = 64 * 1024


def install(application: object, options: Mapping[str, Any], soon: Soon) -> None:
    """Make twistd write this application's log as JSON, to where its own `options` say.

    `soon` schedules a function from a signal handler. Raises `ValueError` for syslog, and for a daemon without a file.
    """
    if options.get("syslog"):
        raise ValueError("LOG_FORMAT=json cannot write to syslog: leave out --syslog, or set LOG_FORMAT=text")
    if isinstance(application, Componentized):
        application.setComponent(ILogObserver, FileLogObserver(_file(options, soon), json_line))


def _file(options: Mapping[str, Any], soon: Soon) -> Any:
    """Open what twistd would write to: `--logfile`, rotated at SIGUSR1, standard output, or twistd's default file."""
    name, stays = options.get("logfile") or "", options.get("nodaemon")
    if stays and name in ("", "-"):
        return sys.stdout
    if name == "-":
        raise ValueError("a daemon cannot log to standard output: give --nodaemon, or --logfile with a file")
    file = LogFile.fromFullPath(name or "twistd.log")
    signal.signal(signal.SIGUSR1, lambda *_: soon(file.rotate))
    return file


def json_line(event: LogEvent) -> str:
    """Format an event as a line of JSON: time, level, logger, format string, text, fields and traceback."""
    level, failure = event.get("log_level"), event.get("log_failure") or event.get("failure")
    line: dict[str, object] = {
        "time": datetime.fromtimestamp(float(event.get("log_time", 0.0)), UTC).isoformat(timespec="microseconds"),
        "level": level.name if level is not None else "error" if event.get("isError") else "info",
        "logger": str(event.get("log_namespace") or event.get("log_system") or "-"),
    }
    text = formatEvent(event)[:MAX_TEXT]
    line |= {"event": _plain(event.get("log_format") or text), "text": text}
    fields = {name: _plain(value) for name, value in event.items() if not _of_frame(name)}
    line |= {"fields": fields} if fields else {}
    if failure is not None:
        line["traceback"] = failure.getTraceback()[-MAX_TEXT:]
    return json.dumps(line) + "\n"


def _of_frame(name: str) -> bool:
    return name.startswith("log_") or name in _FRAME


def _plain(value: object) -> object:
    """Convert a field for JSON: None, booleans, finite floats and short integers stay, all others become text."""
    if value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, int) and value.bit_length() <= _BITS:
        return value
    try:
        return str(value)[:MAX_TEXT]
    except Exception as error:  # noqa: BLE001 - an object without a text must not cost the line
        return f"unprintable: {type(error).__name__}"
