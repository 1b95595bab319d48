"""The REST and gRPC servers: how bytes become calls and replies."""
