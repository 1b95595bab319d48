"""The sockets of another process, and what the kernel knows of them. Linux only, blocking."""
