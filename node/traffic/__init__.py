"""Bytes: the counters of cores into a ledger, and the rows that controllers are given."""
