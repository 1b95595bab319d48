"""While the node's modules are imported Python looks for no garbage: they stay, and the looking takes some 30 ms of the
start. `node.tap` imports this first, and calls `over` behind its imports.
"""

from __future__ import annotations

import gc

gc.disable()


def over() -> None:
    """From here on Python looks for garbage, never again among what was imported: that would take 20 ms each time."""
    gc.freeze()
    gc.enable()
