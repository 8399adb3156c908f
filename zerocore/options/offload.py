"""Which parts of the training state leave the device for the host's memory or a disk."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zerocore.common.checks import check_int
from zerocore.options.stages import STAGES, placements_of

PLACES = ("device", "cpu", "disk")
FIRST_STAGE = {
    "states": STAGES[0],
    "gradients": next(stage for stage in STAGES if placements_of(stage).gradients),
    "parameters": next(stage for stage in STAGES if placements_of(stage).parameters),
}
"""The lowest stage at which each part can leave the device."""


@dataclass(frozen=True)
class Offload:
    """The memory of each part of the training state: ``"device"``, ``"cpu"`` or ``"disk"``.

    Attributes:
        states: what the optimizer keeps, and the weights that it updates. On ``"cpu"``
            ``model.parameters()`` lie there; ``zerocore.optim.AdamW`` updates them unit by unit
            under the next forward, other optimizers of elements in their step. On ``"disk"`` they
            are memory whose bytes are a file's, and ``zerocore.optim.AdamW`` is the only optimizer.
        gradients: between the steps, at stages 2 and 3; not on ``"disk"``.
        parameters: what layers compute with, at stage 3 and where ``states`` leave the device:
            each gather loads its part from the host, or reads it from the disk.
        path: folder of what is on ``"disk"``: a file without a name for each rank, which is gone
            when the process is.
        threads: that share a unit's update on the host. None for this rank's share of the cores
            that it may run on, less one for the thread that feeds a device; where the CPU computes,
            no more than torch computes with. The numbers do not depend on it.

    Raises:
        ValueError: no such place, a part that cannot be there, nothing that leaves the device, or
            ``threads`` below 1.
        TypeError: a part or ``path`` that is no string, or ``threads`` that is no int.
    """

    states: str = "cpu"
    gradients: str = "device"
    parameters: str = "device"
    path: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in FIRST_STAGE:
            self._check_place(name, getattr(self, name))
        if self.path is not None and not isinstance(self.path, str):
            raise TypeError(f"offload: path must be a string or None, got {self.path!r}")
        if (self.path is not None) != self.uses_disk:
            needed = "needs path=, a folder" if self.uses_disk else "is missing: path= goes with it"
            raise ValueError(f"offload: 'disk' {needed}")
        if self.threads is not None:
            check_int("threads", self.threads, 1)
        if self.parameters != "device" and self.states == "device":
            raise ValueError(
                f"offload: parameters={self.parameters!r} goes with states='cpu' or 'disk', as the "
                "optimizer updates them where they lie; got states='device'"
            )
        if self.places == {"device"}:
            raise ValueError("offload: nothing leaves the device; leave offload= out instead")

    @property
    def places(self) -> set[str]:
        """Where the parts are."""
        return {self.states, self.gradients, self.parameters}

    @property
    def uses_disk(self) -> bool:
        return "disk" in self.places

    def check_stage(self, stage: int) -> None:
        """Raises ValueError for a part that stays on the device at that stage."""
        for name, first in FIRST_STAGE.items():
            place = getattr(self, name)
            if place != "device" and stage < first:
                raise ValueError(
                    f"offload: {name}={place!r} needs stage {first} or higher, as below every rank "
                    f"computes with all {name}; got stage {stage}"
                )

    def check_path(self) -> None:
        """Raises ValueError if there is no folder that this process can write to."""
        path = self.path
        if path is not None and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
            raise ValueError(f"offload: path={path!r} is no folder that this process can write to")

    def _check_place(self, name: str, place: object) -> None:
        known = PLACES[:-1] if name == "gradients" else PLACES
        expected = " or ".join([", ".join(map(repr, known[:-1])), repr(known[-1])])
        if place not in known:
            kind = ValueError if isinstance(place, str) else TypeError
            raise kind(f"offload: {name} must be {expected}, got {place!r}")


def place_of(offload: Offload | None, part: str) -> str:
    """Where a part of the state is, named as an attribute of :class:`Offload`."""
    return "device" if offload is None else str(getattr(offload, part))
