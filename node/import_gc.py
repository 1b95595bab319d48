"""No garbage collection while the node's modules are imported: they stay, and collecting takes some 30 ms of the start.

`node.tap` imports this module first, and calls `resume` after its imports.
"""

from __future__ import annotations

import gc

gc.disable()


def resume() -> None:
    """Collect garbage from here on, but never look at what was imported: that would take 20 ms each time."""
    gc.freeze()
    gc.enable()
