"""Which parts of the training state lie in the host's memory: a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from zerocore.common.checks import check_int

PLACES = ("device", "cpu", "disk")
FIRST_STAGE = {"states": 0, "gradients": 2, "parameters": 3}
"""The lowest stage at which each part can leave the device."""


@dataclass(frozen=True)
class Offload:
    """What leaves the device: each part is ``"device"`` or ``"cpu"``, for itself.

    Attributes:
        states: what the optimizer keeps, and the weights that it updates. On ``"cpu"``
            ``model.parameters()`` lie there; ``zerocore.optim.AdamW`` updates them unit by unit
            under the next forward, other optimizers of elements in their step.
        gradients: between the steps, at stages 2 and 3.
        parameters: what layers compute with, at stage 3 and with ``states="cpu"``: each gather
            loads its part from the host.
        path: folder of what is on ``"disk"``.
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
        if self.path is not None:
            raise ValueError("offload: path goes with 'disk', which is not built yet; leave it out")
        if self.threads is not None:
            check_int("threads", self.threads, 1)
        if self.parameters == "cpu" and self.states != "cpu":
            raise ValueError(
                "offload: parameters='cpu' goes with states='cpu', as the optimizer updates them "
                f"where they lie; got states={self.states!r}"
            )
        if self.places == {"device"}:
            raise ValueError("offload: nothing leaves the device; leave offload= out instead")

    @property
    def places(self) -> set[str]:
        """Where the parts are."""
        return {self.states, self.gradients, self.parameters}

    def check_stage(self, stage: int) -> None:
        """Raises ValueError for a part that stays on the device at that stage."""
        for name, first in FIRST_STAGE.items():
            place = getattr(self, name)
            if place != "device" and stage < first:
                raise ValueError(
                    f"offload: {name}={place!r} needs stage {first} or higher, as below every rank "
                    f"computes with all {name}; got stage {stage}"
                )

    @staticmethod
    def _check_place(name: str, place: object) -> None:
        if not isinstance(place, str):
            raise TypeError(f"offload: {name} must be 'device' or 'cpu', got {place!r}")
        if place not in PLACES:
            raise ValueError(f"offload: {name} must be 'device' or 'cpu', got {place!r}")
        if place == "disk":
            raise ValueError(
                f"offload: {name}='disk' is not built yet; 'cpu' is the farthest there is"
            )


def leaves(offload: Offload | None, part: str) -> bool:
    """Whether a part of the state, named as an attribute of :class:`Offload`, leaves the device."""
    return offload is not None and getattr(offload, part) != "device"
