"""Check a node: `python -m tests.conformance --address HOST:PORT --key KEY --certificate FILE`."""

from __future__ import annotations

import argparse
import fnmatch
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import tests.conformance.checks  # noqa: F401 - the checks are there then
from drivers.install.install import InstallError
from scripts.staging.target import Address
from tests.conformance import report
from tests.conformance.registry import BOTH, CHECKS, Check, Level
from tests.conformance.runner import Result, run_all
from tests.conformance.stage import Options, Stage


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.conformance", description=__doc__)
    parser.add_argument("--address", metavar="HOST:PORT", help="the node; the certificate has to be for this host")
    parser.add_argument("--grpc-port", type=int, help="where gRPC has another port")
    parser.add_argument("--key", help="an API key of the node; or a file that has it")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="the PEM that controllers pin")
    parser.add_argument("--protocol", choices=[*BOTH, "both"], default="both", help="the default is both")
    parser.add_argument("--level", choices=list(Level), default=Level.CONTROLLERS, help="what has to hold")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="checks like this, such as 'users.*'")
    parser.add_argument("--core", choices=["xray", "sing-box"], default="xray", help="the core that the node runs")
    parser.add_argument("--host-for-clients", default="127.0.0.1", help="where clients reach the core's inbounds")
    parser.add_argument("--echo-address", default="127.0.0.1", help="where the core reaches this machine")
    parser.add_argument("--no-traffic", action="store_true", help="leave out what needs users' clients, and thus Xray")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds until a change must take effect; 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE, as JSON")
    parser.add_argument("--list", action="store_true", help="print the checks as a table and exit")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0 if the level holds, 1 if not, 2 if the checks cannot run."""
    parser = arguments()
    given = parser.parse_args(argv)
    if given.list:
        print(report.table(), end="")
        return 0
    for name in ("address", "key", "certificate"):
        if not getattr(given, name):
            parser.error(f"--{name} is required")
    try:
        results = run(given, chosen(given.level, given.only))
    except (InstallError, OSError, ValueError) as error:
        parser.error(str(error))
    if not results:
        parser.error("no check matches this level, protocol, core and pattern")
    if given.json:
        given.json.write_text(report.as_json(results, given.level, given.address))
    held = report.holds(results, given.level)
    print(*report.summary(results), f"{given.level}: {'holds' if held else 'does not hold'}", sep="\n")
    return 0 if held else 1


def chosen(level: Level, patterns: Sequence[str] | None) -> list[Check]:
    """The checks of a level and of those before it that match a pattern."""
    patterns = patterns or ["*"]
    checks = [check for check in CHECKS.values() if report.within(check, level)]
    return [check for check in checks if any(fnmatch.fnmatch(check.id, pattern) for pattern in patterns)]


def run(given: argparse.Namespace, checks: Sequence[Check]) -> list[Result]:
    protocols = BOTH if given.protocol == "both" else (given.protocol,)
    results = []
    with Stage(options(given)) as stage:
        for result in run_all(checks, protocols, stage):
            print(report.line(result), flush=True)
            results.append(result)
    return results


def options(given: argparse.Namespace) -> Options:
    host, _, port = given.address.rpartition(":")
    grpc_port = given.grpc_port or int(port)
    key = Path(given.key).read_text().strip() if Path(given.key).is_file() else given.key
    pem = given.certificate.read_text()
    ssl.create_default_context(cadata=pem)  # Raises OSError for an invalid certificate.
    node = Address(host, int(port), grpc_port, key, pem)
    return Options(node, given.core, given.host_for_clients, given.echo_address, given.patience, not given.no_traffic)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
