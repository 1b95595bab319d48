"""Figures for Prometheus, and whether the node is alive and ready.

What is told is a table (`families`). Values are read when somebody asks, by whom all who ask at once are served, and
never waited for longer than a bound.
"""
