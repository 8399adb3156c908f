"""Plans the memory and the time of training steps before they run."""

from zerocore.common.links import Link
from zerocore.common.memory_bytes import MemoryBytes
from zerocore.planning.prediction import predict_events, predict_memory
from zerocore.planning.result import Plan, StagePlan

__all__ = [
    "Link",
    "MemoryBytes",
    "Plan",
    "StagePlan",
    "predict_events",
    "predict_memory",
]
