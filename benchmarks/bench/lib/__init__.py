"""Parts of several benchmarks: systems, models, ranks, links, timing, results."""
