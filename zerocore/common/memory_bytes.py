"""The bytes of one rank, by purpose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on one rank.

    Attributes:
        parameters: parameters that stay between steps, gaps and padding included.
        gradients: gradient memory that stays between steps.
        optimizer: states of the parameters' size (step counters not counted).
        pool: the most bytes of the bucket pool in use: gathered parameters, unreduced gradients.
        main_weights: the optimizer's copies of parameters that layers use in another dtype.
        pool_reserved: the most bytes that the bucket pool has taken from the device's allocator;
            it keeps them.
        host_weights: on the host: weights that the optimizer updates, and parameters.
        host_gradients: on the host: gradients that stay there, or are sent for the update.
        host_optimizer: on the host: states.
        host_buffers: on the host: the most that parts on disk take during their use, and gaps
            between the other parts.
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
        """Bytes on the host; the others are on the device, except those on disk."""
        stays = self.host_weights + self.host_gradients + self.host_optimizer
        return stays + self.host_buffers

    @property
    def model_state(self) -> int:
        """Bytes on the device that stay between steps, without the pool."""
        return self.parameters + self.main_weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The most bytes in use: the model state, and the pool in use."""
        return self.model_state + self.pool

    @property
    def reserved(self) -> int:
        """The most bytes taken from the device's allocator: the model state, and the whole pool."""
        return self.model_state + self.pool_reserved
