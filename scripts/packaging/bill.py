"""The bill of materials of a release, as CycloneDX JSON: the wheel, and the packages of deploy/requirements.txt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime

_PACKAGE = re.compile(r"^([\w.-]+)==(\S+)[^\n]*((?:\n +--hash=[^\n]+)+)", re.MULTILINE)
_DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def bill(version: str, wheel: bytes, lock: str, seconds: int) -> str:
    """The bill of this version, made at this time of the clock. The same arguments give the same text."""
    packages = list(_packages(lock))
    node = {
        "type": "application",
        "bom-ref": _purl("txnode", version),
        "name": "txnode",
        "version": version,
        "purl": _purl("txnode", version),
        "licenses": [{"license": {"id": "MIT"}}],
        "hashes": [_sha256(hashlib.sha256(wheel).hexdigest())],
    }
    made = datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    found = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": made, "component": node},
        "components": packages,
        "dependencies": [{"ref": node["bom-ref"], "dependsOn": [package["bom-ref"] for package in packages]}],
    }
    return json.dumps(found, indent=1) + "\n"


def _packages(lock: str) -> Iterator[dict[str, object]]:
    for name, version, digests in _PACKAGE.findall(lock):
        yield {
            "type": "library",
            "bom-ref": _purl(name, version),
            "name": name,
            "version": version,
            "purl": _purl(name, version),
            # Those of all its files: which one a server takes depends on its Python and CPU.
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": f"https://pypi.org/project/{name}/{version}/",
                    "hashes": [_sha256(digest) for digest in _DIGEST.findall(digests)],
                }
            ],
        }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}
