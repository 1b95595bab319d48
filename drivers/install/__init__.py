"""Find or install a core's executable: `python -m drivers.install`, a program of its own."""
