"""Turns a model into a sharded one: what is asked for is checked first, then built."""
