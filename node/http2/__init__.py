"""HTTP/2 (RFC 9113) and the messages of gRPC in it: for connections of controllers, and for calls to cores."""
