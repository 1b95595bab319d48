"""Cores that live on when the node is killed: what is on disk for the next node, and who ends them if none comes."""
