"""What any node of this interface can be held to, judged by what it puts on the wire: see docs/conformance.md.

Nothing here knows how a node is made: there are its address, a key, a certificate, and clients of its core.
"""
