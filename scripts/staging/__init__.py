"""Test bed for a node: the node and cores as processes, users, inbounds of every kind, a client, an echo server.

The demonstration, the benches and the tests build on it; it imports none of them.
"""
