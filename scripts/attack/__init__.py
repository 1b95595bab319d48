"""Fuzzers: generated input of strangers, broken clients and controllers, sent to a node by the thousand."""
