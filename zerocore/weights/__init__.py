"""Exports, copies and averages the weights of sharded models for evaluation and serving."""

from zerocore.weights.averages import EMA
from zerocore.weights.buckets import Bucket, Export
from zerocore.weights.clones import copy_weights
from zerocore.weights.info import ExportInfo, export_info, fused
from zerocore.weights.own_shards import Shard, shards

__all__ = [
    "EMA",
    "Bucket",
    "Export",
    "ExportInfo",
    "Shard",
    "copy_weights",
    "export_info",
    "fused",
    "shards",
]
