"""Tests with real cores, real traffic, and the node as a process."""
