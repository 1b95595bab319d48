"""Keys and signatures as a release has them, made by the real `ssh-keygen`."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Signer:
    """A key pair in `file` and `file`.pub."""

    def __init__(self, file: Path, kind: str = "ed25519") -> None:
        self.file = file
        self._call("-q", "-t", kind, "-N", "", "-C", "releases of a test", "-f", str(file))
        # A line of `authorized_keys`, with a comment.
        self.public = file.with_name(f"{file.name}.pub").read_text().strip()
        # Without the comment.
        self.key = " ".join(self.public.split()[:2])

    def sign(self, content: bytes, namespace: str = "txnode", digest: str = "sha512") -> bytes:
        """Return the signature of these bytes."""
        return self._call(
            "-Y", "sign", "-q", "-O", f"hashalg={digest}", "-n", namespace, "-f", str(self.file), text=content
        )

    @staticmethod
    def _call(*words: str, text: bytes = b"") -> bytes:
        return subprocess.run(["ssh-keygen", *words], input=text, check=True, stdout=subprocess.PIPE).stdout
