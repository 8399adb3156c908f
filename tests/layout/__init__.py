"""Tests of zerocore/layout."""
