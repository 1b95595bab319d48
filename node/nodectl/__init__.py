"""nodectl, the command line for nodes. The commands are in `commands`; `app` lists them.

A command calls nodes through `session`, which prints their replies through `output`. The node imports none of it.
"""
