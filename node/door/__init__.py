"""Accepts the connections of both protocols: TLS, limits, deadlines, HTTP/2 frames, delivery of replies."""
