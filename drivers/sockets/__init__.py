"""Inspect and control the sockets of a child process. Linux only, blocking."""
