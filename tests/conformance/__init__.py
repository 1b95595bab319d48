"""Conformance checks for any node of this interface, judged by its behaviour on the wire: see docs/conformance.md.

They depend on no implementation: they have a node's address, a key, a certificate, and clients of its core.
"""
