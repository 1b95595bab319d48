"""The ports of both protocols: TLS, limits and deadlines, and how bytes become calls and replies."""
