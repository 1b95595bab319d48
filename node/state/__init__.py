"""The node's persistent state: its directory, the SQLite file in it, and when that is written."""
