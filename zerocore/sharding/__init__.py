"""Turns a model into a sharded one: checks the model and the options first, then builds."""
