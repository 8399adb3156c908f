"""Tests of zerocore/reporting."""
