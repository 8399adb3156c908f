"""Tests of zerocore/matrices."""
