"""Attackers: what strangers and controllers could send, made by the thousand. Each module can be run by itself."""
