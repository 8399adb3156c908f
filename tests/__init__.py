"""Tests of zerocore."""
