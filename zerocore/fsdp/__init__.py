"""FSDP2's interface on this engine: what ``torch.distributed.fsdp`` exports of it, by its names."""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from zerocore.fsdp.installing import install, installed, uninstall
from zerocore.fsdp.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from zerocore.fsdp.policy import MixedPrecisionPolicy
from zerocore.fsdp.shard import fully_shard
from zerocore.planning.prediction import predict_memory

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "install",
    "installed",
    "predict_memory",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "uninstall",
]
