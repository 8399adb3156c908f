"""Sharded tensors as torch sees them: their place, and the rules of torch functions on them."""

from zerocore.layout.place import Place
from zerocore.tensor.parameter import ShardedGrad
from zerocore.tensor.shard import LocalShard

__all__ = [
    "LocalShard",
    "Place",
    "ShardedGrad",
]
