"""Tests of zerocore/hooks."""
