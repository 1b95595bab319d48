"""What the node and a driver have in common: users, changes, counters, and what a driver must bring.

The node owns it. Drivers import this room, `node.errors`, `node.logs`, `node.waiting` and `node.http2`, and nothing else of the node.
"""
