"""Bytes of one rank, by what holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on one rank.

    Attributes:
        parameters: parameters that stay between steps, gaps and padding included.
        gradients: gradient memory that stays between steps.
        optimizer: states of the parameters' size (step counters not counted).
        pool: most bytes of the bucket pool in use: gathered parameters, gradients on their way.
        main_weights: the optimizer's copies of parameters that compute in another dtype.
        pool_reserved: most bytes that the bucket pool took from the device's allocator; kept once
            taken.
        host_weights: on the host: weights that the optimizer updates, and parameters.
        host_gradients: on the host: gradients that stay there, or are sent for the update.
        host_optimizer: on the host: states.
        host_buffers: on the host: most that what lies on disk takes while it is worked on, and
            gaps between the other parts.
        disk: bytes of the file in ``Offload.path``.
    """

    parameters: int
    gradients: int
    optimizer: int
    pool: int
    main_weights: int = 0
    pool_reserved: int = 0
    host_weights: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0
    host_buffers: int = 0
    disk: int = 0

    @property
    def host(self) -> int:
        """Bytes on the host; all others but those on disk are on the device."""
        stays = self.host_weights + self.host_gradients + self.host_optimizer
        return stays + self.host_buffers

    @property
    def model_state(self) -> int:
        """Bytes that stay between steps, without the pool."""
        return self.parameters + self.main_weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Most bytes in use: the model state, and the pool in use."""
        return self.model_state + self.pool

    @property
    def reserved(self) -> int:
        """Most bytes taken from the device's allocator: the model state, and all of the pool."""
        return self.model_state + self.pool_reserved
