"""Parameters that gather themselves, by ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

``shard`` and ``fully_shard`` use this. The engine gathers the tensors that the first function
returns, as rows of bytes: frozen parameters of the unit. The second function makes the full
parameter from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerocore._C import Engine, UnitParam, move_window, window_on
from zerocore.model.casting import as_bytes
from zerocore.model.state import Encoded, ShardState, Unit
from zerocore.options.precision import BYTES, ParamTypes, unit_param
from zerocore.tensor.rows import at_origin, local_part
from zerocore.tensor.wrapped import PRE, show_made

if TYPE_CHECKING:  # the import takes a second
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(eq=False)
class Extension:
    """One parameter that gathers itself."""

    fqn: str  # its name in errors
    rows: Any  # this rank's rows of the parameter
    module: nn.Module  # the module that has it
    mesh: DeviceMesh  # 1-D: the ranks that share its rows
    policy: MixedPrecisionPolicy  # of the module
    shape: torch.Size  # of the full parameter
    owners: Sequence[tuple[nn.Module, str]] = ()  # modules that have it, and its name in each
    is_param: bool = True  # the unit has it; if not, the unit has an ungathered full parameter
    version: Callable[[], int] | None = None  # of its values; None if they never change
    encoded_version: int = -1
    inputs: tuple[Tensor, ...] = ()  # this rank's tensors for the next gather
    metadata: Any = None  # fsdp_pre_all_gather's, for fsdp_post_all_gather
    own: tuple[Tensor, ...] = ()  # the engine's memory of this rank's rows of each, as bytes
    full: tuple[Tensor, ...] = ()  # the engine's memory of the gathered rows
    # Tensors on ``full`` with storages of their own: tensors saved for a backward read there.
    windows: tuple[Tensor, ...] = field(default=(), repr=False)

    def ask(self) -> None:
        """Asks the parameter for the tensors to gather; raises AssertionError if the function's
        signature is not FSDP2's."""
        pre = self.rows.fsdp_pre_all_gather
        count = len(signature(pre).parameters)
        arguments: tuple[Any, ...] = (self.mesh,)
        if count == 5:
            arguments += (*self._outer(), self.module, self.policy)
        elif count != 1:
            raise AssertionError(
                f"parameter '{self.fqn}': {PRE} takes {count} arguments; expected mesh, or "
                "mesh, outer_size, outer_stride, module and mp_policy"
            )
        with torch.no_grad():
            inputs, self.metadata = pre(*arguments)
        self.inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)

    def _outer(self) -> tuple[torch.Size, tuple[int, ...]]:
        like = torch.empty(self.shape, device="meta")
        return like.shape, like.stride()

    @property
    def kinds(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the inputs, the same on all ranks."""
        return [(tensor.shape, tensor.dtype) for tensor in self.inputs]

    def unit_params(self) -> list[UnitParam]:
        """Describes the inputs of all ranks to the engine, as parameters; and the full parameter,
        if the unit does not have it."""
        params = []
        for index, tensor in enumerate(self.inputs):
            rows, nbytes = _bytes(tensor).shape
            like = torch.empty(self.mesh.size() * rows, nbytes, dtype=torch.uint8, device="meta")
            params.append(unit_param(f"{self.fqn}.{index}", like, BYTES))
        if not self.is_param:
            dtype = self.rows.dtype
            like = torch.empty(self.shape, dtype=dtype, device="meta")
            types = ParamTypes(dtype, dtype, dtype, dtype)
            params.append(unit_param(self.fqn, like, types, is_gathered=False, is_kept=False))
        return params

    def bind(self, engine: Engine, unit: Unit) -> None:
        """Takes the engine's memory for the inputs, after the unit's parameters so far."""
        own, full = [], []
        for _, dtype in self.kinds:
            position = len(unit.params) + len(unit.encoded)
            gathered = nn.Parameter(engine.make_full(unit.index, position), requires_grad=False)
            part = at_origin(engine.make_shard(unit.index, position))
            engine.bind(unit.index, position, gathered, part, None, part, is_seen=False)
            own.append(part)
            full.append(gathered)
            unit.encoded.append(Encoded(engine.spec(unit.index, position), dtype))
        self.own, self.full = tuple(own), tuple(full)

    def is_stale(self) -> bool:
        """Whether its values have changed since the last :meth:`encode`."""
        return self.version is not None and self.encoded_version != self.version()

    @torch.no_grad()
    def encode(self) -> None:
        """Asks the parameter, and copies its tensors to the engine; raises RuntimeError if their
        shapes or dtypes have changed."""
        before = self.kinds
        self.ask()
        if self.kinds != before:
            after, self.inputs = self.kinds, _outlines(before)
            raise RuntimeError(
                f"parameter '{self.fqn}': {PRE} returned {after}, in the forward before {before}; "
                "the engine gathers the same shapes in every step"
            )
        for own, tensor in zip(self.own, self.inputs, strict=True):
            own.copy_(_bytes(tensor).view(own.shape))
        self.inputs = _outlines(before)
        self.encoded_version = 0 if self.version is None else self.version()

    def show(self, leaf: Tensor) -> Tensor:
        """Returns the full parameter made from the gathered rows; its gradient goes to ``leaf``."""
        return show_made(leaf, self._make)

    def _make(self, leaf: Tensor) -> Tensor:
        if not self.windows:
            self.windows = tuple(window_on(full) for full in self.full)
        for window, full in zip(self.windows, self.full, strict=True):
            move_window(window, full)
        return self.make(self.windows, leaf.dtype)

    def make(self, gathered: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Makes the full parameter from the gathered bytes of all ranks."""
        outputs = tuple(
            tensor.view(-1).view(input_dtype).view(-1, *shape[1:])
            for tensor, (shape, input_dtype) in zip(gathered, self.kinds, strict=True)
        )
        full, _ = self.rows.fsdp_post_all_gather(outputs, self.metadata, dtype)
        result: Tensor = torch.as_strided(full, *self._outer(), storage_offset=0)
        return result


def _outlines(kinds: list[tuple[torch.Size, torch.dtype]]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds)


def _bytes(tensor: Tensor) -> Tensor:
    """Returns a tensor's rows as bytes, 2-D."""
    rows = tensor.shape[0] if tensor.dim() else 1
    flat = as_bytes(tensor)
    return flat.view(rows, flat.numel() // rows if rows else 1)


def check_engine_gathers(units: Sequence[Unit], what: str) -> None:
    """Rejects parameters of zerocore.fsdp models that gather themselves."""
    for param in (param for unit in units for param in unit.params):
        if hasattr(param.shard, "_spec") and hasattr(local_part(param.shard), PRE):
            raise NotImplementedError(
                f"parameter '{param.fqn}' gathers itself, which {what} does not support for models "
                "of zerocore.fsdp; use the module's unshard(), or torch.distributed.checkpoint"
            )


def check_plain(state: ShardState, what: str) -> None:
    """Rejects a model with a parameter that consists of several tensors."""
    for name in state.several():
        raise NotImplementedError(
            f"parameter '{name}' consists of several tensors, which {what} cannot write; save the "
            "trained parameters (zerocore.full_state_dict, or an adapter's parameters)"
        )
