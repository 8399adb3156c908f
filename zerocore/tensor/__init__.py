"""A sharded parameter as torch sees it: where it lies, and what torch functions mean on it."""

from zerocore.layout.place import Place
from zerocore.tensor.parameter import ShardedGrad
from zerocore.tensor.shard import LocalShard

__all__ = [
    "LocalShard",
    "Place",
    "ShardedGrad",
]
