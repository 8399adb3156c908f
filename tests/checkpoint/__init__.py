"""Tests of zerocore/checkpoint."""
