"""Two builds of zerocore, timed in turn."""
