"""gRPC's calls to a core, on the reactor: HTTP/2's client side, as far as they need it.

gRPC's own client lives in another thread; to wake that thread and to be woken by it costs more than a call.
"""
