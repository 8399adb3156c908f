"""Recovers training from faults: compares state, undoes failed steps, replaces lost ranks."""

from zerocore.recovery.elastic import Life
from zerocore.recovery.peers import PeerCheckpoints
from zerocore.recovery.retrying import Attempt
from zerocore.recovery.snapshots import Snapshot
from zerocore.recovery.verification import Difference, Verification

__all__ = [
    "Attempt",
    "Difference",
    "Life",
    "PeerCheckpoints",
    "Snapshot",
    "Verification",
]
