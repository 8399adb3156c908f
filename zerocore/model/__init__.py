"""A sharded model: its options, units, ranks, dtypes, calls and state."""
