"""The option that moves parts of the training state from the device to the host or a disk."""

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
"""The lowest stage at which each part can be offloaded."""


@dataclass(frozen=True)
class Offload:
    """The memory of each part of the training state: ``"device"``, ``"cpu"`` or ``"disk"``.

    Attributes:
        states: the optimizer's states, and the weights that it updates. With ``"cpu"``,
            ``model.parameters()`` are, too. ``zerocore.optim.AdamW`` updates them unit by unit
            during the next forward, other element-wise optimizers in their step. With ``"disk"``,
            they are the mapped memory of a file, and only ``zerocore.optim.AdamW`` can update them.
        gradients: the gradients between steps, at stages 2 and 3; not on ``"disk"``.
        parameters: the weights that layers compute with, at stage 3 if ``states`` are not on the
            device: each gather copies this rank's part from the host, or reads it from the disk.
        path: folder for the parts on ``"disk"``: an unnamed file per rank, which disappears with
            the process.
        threads: threads that share a unit's update on the host. None takes this rank's share of the
            cores that it may run on, less one for the thread that feeds a device; if the CPU
            computes, no more than torch's threads. The results do not depend on it.

    Raises:
        ValueError: an unknown place, a part that cannot be there, all parts on the device, or
            ``threads`` below 1.
        TypeError: a part or ``path`` is not a string, or ``threads`` is not an int.
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
            texts = {True: "'disk' needs path=, a folder", False: "path= needs a part on 'disk'"}
            raise ValueError(f"offload: {texts[self.uses_disk]}")
        if self.threads is not None:
            check_int("threads", self.threads, 1)
        if self.parameters != "device" and self.states == "device":
            raise ValueError(
                f"offload: parameters={self.parameters!r} needs states='cpu' or 'disk', because "
                "the optimizer updates them there; got states='device'"
            )
        if self.places == {"device"}:
            raise ValueError("offload: all parts are on the device; leave offload= out instead")

    @property
    def places(self) -> set[str]:
        """The places of all parts."""
        return {self.states, self.gradients, self.parameters}

    @property
    def uses_disk(self) -> bool:
        return "disk" in self.places

    def check_stage(self, stage: int) -> None:
        """Rejects a part that cannot be offloaded at that stage (ValueError)."""
        for name, first in FIRST_STAGE.items():
            place = getattr(self, name)
            if place != "device" and stage < first:
                raise ValueError(
                    f"offload: {name}={place!r} needs stage {first} or higher, because below it "
                    f"every rank computes with all {name}; got stage {stage}"
                )

    def check_path(self) -> None:
        """Rejects a path that is not a folder, or that this process cannot write to."""
        path = self.path
        if path is not None and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
            raise ValueError(f"offload: path={path!r} is not a folder this process can write to")

    def _check_place(self, name: str, place: object) -> None:
        known = PLACES[:-1] if name == "gradients" else PLACES
        expected = " or ".join([", ".join(map(repr, known[:-1])), repr(known[-1])])
        if place not in known:
            kind = ValueError if isinstance(place, str) else TypeError
            raise kind(f"offload: {name} must be {expected}, got {place!r}")


def place_of(offload: Offload | None, part: str) -> str:
    """Returns where a part of the state is; ``part`` is an attribute of :class:`Offload`."""
    return "device" if offload is None else str(getattr(offload, part))
