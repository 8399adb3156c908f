"""Public optimizers, each as a program under every stage, compared with plain replicas.

`python -m tests.distributed.optimizers` prints which stage trains which optimizer exactly.
"""
