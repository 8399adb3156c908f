"""Sharded models in other libraries' trainers: no wrapper around them, checkpoints of shards."""
