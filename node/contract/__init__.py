"""What the node and a driver have in common: users, changes, counters, and what a driver must bring.

The node owns it. Drivers import this room and small parts of the hall, `node.errors` and `node.waiting` among them.
"""
