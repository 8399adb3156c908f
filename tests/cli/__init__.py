"""Tests of zerocore/cli."""
