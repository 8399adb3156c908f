"""Shared by several benchmarks: systems, models, ranks, links, timing, results."""
