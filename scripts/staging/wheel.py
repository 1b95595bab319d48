"""Build a wheel of the node's current modules under any version, and install it into a virtual environment."""

from __future__ import annotations

import base64
import hashlib
import io
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.packaging.version import WRITTEN, text_of

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("node", "drivers", "protos", "twisted")


def wheel(version: str, added: Mapping[str, str] | None = None, needs: str = "twisted") -> bytes:
    """A wheel of the node's modules with this version; `added` maps modules to code that is appended to them.

    `needs` is the distribution that it requires.
    """
    info = f"txnode-{version}.dist-info"
    files = dict(_modules())
    files[str(WRITTEN)] = text_of(version).encode()
    for module, code in (added or {}).items():
        files[module] += f"\n{code}\n".encode()
    files[f"txnode-{version}.data/data/share/txnode/version"] = version.encode()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: txnode\nVersion: {version}\nRequires-Dist: {needs}\n".encode()
    )
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: staging\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nnodectl = node.nodectl.app:main\n"
    rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


class Environment:
    """A virtual environment below `directory` with this wheel; other packages come from the current environment."""

    def __init__(self, directory: Path, packed: bytes, version: str, name: str = "txnode") -> None:
        self.root = directory / "environment"
        # pip comes from there, too: to install it here takes longer than all else.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.root], check=True)
        [self.modules] = self.root.glob("lib/python*/site-packages")
        (self.modules / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        self.twistd = self.root / "bin" / "twistd"
        self.twistd.write_text(f"#!{self.python}\nfrom twisted.scripts.twistd import run\nrun()\n")
        self.twistd.chmod(0o755)
        self.install(packed, version, name)

    def install(self, packed: bytes, version: str, name: str = "txnode") -> None:
        """Install this wheel over what is there."""
        file = self.root.with_name(f"{name}-{version}-py3-none-any.whl")
        file.write_bytes(packed)
        options = ("--quiet", "--no-deps", "--no-index", "--force-reinstall", "--disable-pip-version-check")
        subprocess.run([self.python, "-m", "pip", "install", *options, file], check=True, cwd=file.parent)

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def installed(self) -> str:
        """The version on disk, from its metadata."""
        [info] = self.modules.glob("txnode-*.dist-info")
        return info.name.removeprefix("txnode-").removesuffix(".dist-info")


def _modules() -> Iterator[tuple[str, bytes]]:
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".cache":
                yield str(path.relative_to(_ROOT)), path.read_bytes()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
