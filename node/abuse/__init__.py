"""Abuse of the server by its users: torrents, scans, mail. `abuse` is the part."""
