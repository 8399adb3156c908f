"""Tests of which rank has what: hybrid sharding, near ranks, experts, cut matrices, pipelines."""
