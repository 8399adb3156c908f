"""Weights of sharded models to where they are used: other processes, evaluation, serving."""
