"""Trainers of other libraries for sharded models, without wrappers and with sharded checkpoints."""
