"""Runs environments within their limits: time limits, threads and isolated processes."""
