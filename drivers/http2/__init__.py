"""A gRPC client for the API of a core, on the reactor, with as much of HTTP/2 as that needs.

grpcio's client runs in another thread; waking that thread and being woken by it costs more than a call.
"""
