"""Cores that are not there: no process runs, and no port is opened. `twistd node` cannot reach them."""
