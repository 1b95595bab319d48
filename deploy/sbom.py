"""The image's bill of materials: `sbom.py PACKAGES CORES` adds the cores, with their digests, to CycloneDX JSON."""

import hashlib
import json
import sys
from pathlib import Path


def component(executable: Path) -> dict[str, object]:
    """The entry of a core at `<name>-<version>/<name>`."""
    name, directory = executable.name, executable.parent.name
    return {
        "type": "application",
        "bom-ref": directory,
        "name": name,
        "version": directory.removeprefix(f"{name}-"),
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(executable.read_bytes()).hexdigest()}],
    }


def main(packages: Path, cores: Path) -> None:
    bill = json.loads(packages.read_text())
    found = [*sorted(cores.glob("xray-*/xray")), *sorted(cores.glob("sing-box-*/sing-box"))]
    bill["components"] = [*bill.get("components", []), *map(component, found)]
    json.dump(bill, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
