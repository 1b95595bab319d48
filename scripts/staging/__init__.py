"""A stage to try a node on: the node and cores as processes, users, inbounds of every kind, a client, an echo server.

The demonstration, the benches and the tests play on it; it knows none of them.
"""
