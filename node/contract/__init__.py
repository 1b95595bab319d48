"""The contract between the node and its drivers: users, changes, counters, and the protocols of a driver.

The node owns it. Drivers import this package and `node.base`.
"""
