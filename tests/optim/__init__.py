"""Tests of zerocore/optim."""
