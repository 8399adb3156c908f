"""Tests of zerocore/model."""
