"""The node becomes another version of itself in one process: what goes on goes on, and a bad version is taken back."""
