#!/usr/bin/env bash
# Twisted 26.10.0: `twistd --logger` cannot be given Twisted's own JSON observer.
#
# Guess: `twistd --logger=twisted.logger.jsonFileLogObserver` writes the log as JSON. The documentation of --logger asks
# for "a fully-qualified name to a log observer factory", jsonFileLogObserver is named as one ("Create a FileLogObserver
# that emits JSON-serialized events"), and the other choices of twistd, --syslog and --logfile, need no code.
# Seen: twistd calls the factory without arguments, and this one has to be given a file. The program does not start:
# TypeError, exit status 1. The same holds for textFileLogObserver and FileLogObserver; a factory of one's own that takes
# nothing works, and then --logfile is ignored without a word.
# It matters to a service whose operator wants JSON from a setting alone: a module on sys.path is needed.
#
# Exits 0 while all of this holds.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv environment
environment/bin/pip --quiet --disable-pip-version-check install twisted==26.10.0
cat >service.tac <<'END'
from twisted.application.service import Application, Service
from twisted.internet import reactor
from twisted.logger import Logger


class Speaks(Service):
    def startService(self):
        Logger("speaks").info("it runs: {number}", number=7)
        reactor.callLater(0, reactor.stop)


application = Application("speaks")
Speaks().setServiceParent(application)
END
cat >factory.py <<'END'
import sys

from twisted.logger import jsonFileLogObserver


def to_stdout():
    return jsonFileLogObserver(sys.stdout, recordSeparator="")
END
run() { PYTHONPATH=. timeout 60 environment/bin/twistd --nodaemon --pidfile= "$@" --python service.tac; }

for factory in jsonFileLogObserver textFileLogObserver FileLogObserver; do
  status=0
  run --logger "twisted.logger.$factory" >"$factory" 2>&1 || status=$?
  echo "$factory: exit status $status: $(tail -n 1 "$factory")"
  [[ $status == 1 ]]
  grep -q "TypeError: .*missing .* required positional argument.*'outFile'" "$factory"
done

run --logger factory.to_stdout --logfile "$work/log" >lines
echo "a factory without arguments: $(grep -c '"number": 7' lines) line of JSON; --logfile: $([[ -e log ]] && echo written || echo 'no file')"
[[ $(grep -c '"number": 7' lines) == 1 && ! -e log ]]
