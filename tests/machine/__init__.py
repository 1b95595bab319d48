"""What needs root, tools of Debian's packages (see `packages`) and minutes: `scripts/test --machine` runs it alone.

Each test here has the mark `machine`. Where a tool is missing it fails.
"""
