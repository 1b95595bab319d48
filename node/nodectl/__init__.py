"""nodectl, the command line of nodes: what its commands stand on. They are in `commands`, one module each.

A command asks nodes through `session`, which says their answers through `output`. The node imports none of it.
"""
