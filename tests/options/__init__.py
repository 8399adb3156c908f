"""Tests of options together."""
