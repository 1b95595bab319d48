"""Attackers: what strangers, broken clients and strange controllers may send to a node, made at random."""
