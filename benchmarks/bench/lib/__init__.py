"""What several benchmarks share: systems, models, ranks, links, timing, results."""
