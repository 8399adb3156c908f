"""Tests of zerocore/planning."""
