"""`python -m node.nodectl`: the same as `nodectl`."""

from __future__ import annotations

from node.nodectl.app import main

main()
