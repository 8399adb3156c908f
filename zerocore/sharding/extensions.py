"""Parameters that gather themselves, by ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

The engine gathers the tensors that the first function returns, as rows of bytes: frozen parameters
of the unit. The second function makes the full parameter from them.

In a model of ``shard`` at stage 3, their unit is laid out by rows. Between steps, a trained one is
a plain main weight, and one of several tensors is this rank's rows, in its class. At other stages
the engine gathers the plain parameter, and modules see its class around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from zerocore._C import Engine, UnitParam, move_window, window_on
from zerocore.model.buffers import broadcast
from zerocore.model.casting import as_bytes
from zerocore.model.ranks import Ranks
from zerocore.model.state import ShardState
from zerocore.model.units import Encoded, Param, Unit
from zerocore.options.config import ShardConfig
from zerocore.options.precision import BYTES, MixedPrecision, ParamTypes, unit_param
from zerocore.tensor.rows import at_origin
from zerocore.tensor.shown import ShownView
from zerocore.tensor.wrapped import PRE, own_chunk, show_made, wrapper_of


@dataclass(eq=False)
class Extension:
    """One parameter that gathers itself."""

    param: Param
    rows: Any  # this rank's rows of it
    mesh: DeviceMesh  # 1-D: the ranks that share its rows
    policy: MixedPrecisionPolicy  # of the module
    shape: torch.Size  # of the full parameter
    is_param: bool = True  # the unit has it; if not, the unit has an ungathered full parameter
    version: Callable[[], int] | None = None  # of its values; None if they never change
    encoded_version: int = -1
    inputs: tuple[Tensor, ...] = ()  # this rank's tensors for the next gather
    metadata: Any = None  # fsdp_pre_all_gather's, for fsdp_post_all_gather
    own: tuple[Tensor, ...] = ()  # the engine's memory of this rank's rows of each, as bytes
    full: tuple[Tensor, ...] = ()  # the engine's memory of the gathered rows
    # Tensors on ``full`` with storages of their own: tensors saved for a backward read there.
    windows: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def fqn(self) -> str:
        return self.param.fqn

    def ask(self) -> None:
        """Asks the parameter for the tensors to gather; raises AssertionError if the function's
        signature is not FSDP2's."""
        pre = self.rows.fsdp_pre_all_gather
        count = len(signature(pre).parameters)
        arguments: tuple[Any, ...] = (self.mesh,)
        if count == 5:
            arguments += (*self._outer(), self.param.owners[0][0], self.policy)
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


# -- in a model of ``shard`` --------------------------------------------------------------------


@cache
def _fsdp_state() -> SimpleNamespace:
    """Returns a stand-in for the FSDP state that TransformerEngine's tensors read. It says that
    they are encoded once, for forward and backward."""
    group = SimpleNamespace(_reshard_after_forward=False, _training_state=TrainingState.FORWARD)
    return SimpleNamespace(_fsdp_param_group=group)


def make_extensions(
    params: Sequence[Param], ranks: Ranks, config: ShardConfig, device: torch.device
) -> list[Extension]:
    """Makes the extensions of parameters, and asks for their tensors; collective. Raises
    AssertionError if a function's signature is not FSDP2's."""
    assert ranks.shard is not None
    mesh = DeviceMesh.from_group(ranks.shard, device.type)
    mixed = config.mixed_precision or MixedPrecision()
    reduce, cast = mixed.wire_dtype or mixed.reduce_dtype, mixed.cast_inputs
    policy = MixedPrecisionPolicy(
        mixed.param_dtype, reduce, mixed.output_dtype, cast_forward_inputs=cast
    )
    for owner in (owner for param in params for owner, _ in param.owners):
        vars(owner)["_get_fsdp_state"] = _fsdp_state  # on the object, not its class
    extensions = [
        Extension(
            param,
            _first_rows(param, ranks, config, device),
            mesh,
            policy,
            param.tensor.shape,
            is_param=param.wrapper is not None,
        )
        for param in params
    ]
    for extension in extensions:
        extension.ask()
    return extensions


def _first_rows(param: Param, ranks: Ranks, config: ShardConfig, device: torch.device) -> Tensor:
    """Returns this rank's rows; zeros if the unit will have the values later."""
    if (wrapper := param.wrapper) is None:
        full: Any = param.tensor.detach()
        if config.sync_params:
            broadcast([getattr(full, name) for name in full.__tensor_flatten__()[0]], ranks, device)
        return own_chunk(full, ranks.num_shards, ranks.shard_rank).to(device)
    like = torch.empty(param.tensor.shape, device="meta")
    rows = own_chunk(like, ranks.num_shards, ranks.shard_rank).shape
    return wrapper.around(torch.zeros(rows, dtype=param.types.main, device=device))


def bind_extensions(state: ShardState, unit: Unit) -> None:
    """Takes the engine's memory, and replaces parameters of several tensors by this rank's rows."""
    engine = state.engine
    for extension in unit.extensions:
        extension.bind(engine, unit)
        if not extension.is_param:
            _bind_several(engine, unit, extension)
        else:
            position, shard = unit.params.index(extension.param), extension.param.shard
            local, wrapper = shard.local(), wrapper_of(extension.rows)
            extension.version = partial(engine.param_version, unit.index, position)
            sizes = (local.numel() // max(prod(extension.shape[1:]), 1), *extension.shape[1:])
            assert wrapper is not None
            extension.rows = wrapper.around(local.view(sizes))
            shard.make_view = extension.show
        extension.encode()


def _bind_several(engine: Engine, unit: Unit, extension: Extension) -> None:
    param, position = extension.param, len(unit.params) + len(unit.encoded)
    full = nn.Parameter(engine.make_full(unit.index, position), requires_grad=False)
    part = engine.make_shard(unit.index, position)
    shard = nn.Parameter(extension.rows, requires_grad=False)
    owners = [(owner._parameters, name) for owner, name in param.owners]
    engine.bind(unit.index, position, full, shard, None, part)
    unit.views.append(ShownView(shard, owners, lambda: extension.show(full)))
    engine.set_view(unit.index, position, unit.views[-1].show)
    for owner, name in param.owners:
        owner._parameters[name] = shard
    param.object, param.hidden = shard, full
    unit.encoded.append(Encoded(engine.spec(unit.index, position), None))


def encode_changed(state: ShardState) -> None:
    """Encodes the parameters that gather themselves and have changed. If one raises, its rank
    raises its error, and the other ranks raise a RuntimeError that names the parameter."""
    stale = [extension for extension in state.extensions if extension.is_stale()]
    if not stale:
        return
    errors: dict[str, Exception] = {}
    for extension in stale:
        try:
            extension.encode()
        except Exception as error:
            errors[extension.fqn] = error
    failed = state.engine.any_rank([extension.fqn in errors for extension in stale])
    for extension in stale if any(failed) else ():
        extension.encoded_version = -1  # on all ranks
    for own_error in errors.values():
        raise own_error
    for extension, has_failed in zip(stale, failed, strict=True):
        if has_failed:
            raise RuntimeError(
                f"parameter '{extension.fqn}': another rank could not say what to gather for "
                "it; see that rank's error"
            )
