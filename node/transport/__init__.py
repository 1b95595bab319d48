"""REST and gRPC: connections, TLS, and how bytes become calls and replies."""
