"""Small ordinary programs, run under every system and compared with plain replicas.

`python -m tests.distributed.programs` prints which system gets which program right.
"""
