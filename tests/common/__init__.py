"""Tests of zerocore/common."""
