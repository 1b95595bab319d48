"""Tests that need root, tools from Debian's packages (see `packages`) and minutes: `scripts/test --machine` runs them.

Each has the mark `machine`, and fails if a tool is missing.
"""
