"""Attackers: what strangers, broken clients and controllers could send to a node, made by the thousand."""
