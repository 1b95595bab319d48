"""Prometheus metrics, and health checks (`/livez`, `/readyz`).

`families` is the table of metrics. Values are read on request, once for all requests that come at the same time, and
within a time limit.
"""
