"""Limits of users (quota, expiry, addresses, speed) and the quota of the node itself."""
