"""Where a core's executable comes from: `python -m drivers.install`, a program of its own."""
