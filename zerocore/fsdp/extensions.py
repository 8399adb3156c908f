"""Parameters that say what is gathered of them, by ``fsdp_pre_all_gather``, and make the full one.

Their shards stay what they are, tensors of a class of their own. The engine reduces their gradients
like others, and in the place of a parameter it gathers the inner tensors, as rows of bytes: frozen
parameters of the unit, which nobody owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerocore._C import Engine, UnitParam, move_window, window_on
from zerocore.fsdp.group import Group, RowParam
from zerocore.model.state import Encoded, Unit
from zerocore.tensor.rows import at_origin

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


@dataclass(eq=False)
class Extension:
    """One such parameter of a group.

    Attributes:
        inputs: what this rank gives to the next gathers.
        metadata: what the parameter has said of them.
        own: where the engine has this rank's rows of each, as bytes.
        full: where it gathers them.
        windows: on that, with storages of their own: what was saved for a backward reads there.
    """

    param: RowParam
    group: Group
    inputs: tuple[Tensor, ...] = ()
    metadata: Any = None
    own: tuple[Tensor, ...] = ()
    full: tuple[Tensor, ...] = ()
    windows: tuple[Tensor, ...] = ()

    @property
    def local(self) -> Any:
        """This rank's part of the parameter."""
        shard: Any = self.param.shard
        return shard._local_tensor

    def ask(self) -> None:
        """Asks the parameter what to gather.

        Raises:
            AssertionError: it does not do as FSDP2's interface says.
        """
        pre = self.local.fsdp_pre_all_gather
        count = len(signature(pre).parameters)
        arguments: tuple[Any, ...] = (_shard_mesh(self.group.mesh),)
        if count == 5:
            arguments += (*self._outer(), self.param.owners[0][0], self.group.policy)
        elif count != 1:
            raise AssertionError(
                f"parameter '{self.param.fqn}': {_PRE} takes {count} arguments; expected mesh, or "
                "mesh, outer_size, outer_stride, module and mp_policy"
            )
        with torch.no_grad():
            inputs, self.metadata = pre(*arguments)
        self.inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)

    def _outer(self) -> tuple[torch.Size, tuple[int, ...]]:
        like = torch.empty(self.param.rows.shape, device="meta")
        return like.shape, like.stride()

    @property
    def kinds(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and dtypes of the inputs, the same on all ranks."""
        return [(each.shape, each.dtype) for each in self.inputs]

    def unit_params(self, fqn: str) -> list[UnitParam]:
        """The inputs as parameters of the engine, of the rows of all ranks."""
        size = self.group.mesh.size(self.group.mesh.ndim - 1)
        made = []
        for index, each in enumerate(self.inputs):
            rows, nbytes = _bytes(each).shape
            like = torch.empty(size * rows, nbytes, dtype=torch.uint8, device="meta")
            uint8 = torch.uint8
            made.append(
                UnitParam(
                    f"{fqn}.{index}", like, main=uint8, reduce=uint8, grad=uint8, lacks_main=False
                )
            )
        return made

    def bind(self, engine: Engine, unit: Unit) -> None:
        """Takes memory of the engine, behind what the unit has by now."""
        own, full = [], []
        for _, dtype in self.kinds:
            position = len(unit.params) + len(unit.encoded)
            gathered = nn.Parameter(engine.make_full(unit.index, position), requires_grad=False)
            part = at_origin(engine.make_shard(unit.index, position))
            engine.bind(unit.index, position, gathered, part, None, [], part)
            own.append(part)
            full.append(gathered)
            unit.encoded.append(Encoded(engine.spec(unit.index, position), dtype))
        self.own, self.full = tuple(own), tuple(full)

    @torch.no_grad()
    def encode(self) -> None:
        """Asks the parameter, and gives the engine what it says.

        Raises:
            RuntimeError: shapes or dtypes are other ones than before.
        """
        before = self.kinds
        self.ask()
        if self.kinds != before:
            raise RuntimeError(
                f"parameter '{self.param.fqn}': {_PRE} returned {self.kinds}, in the forward "
                f"before {before}; the engine gathers the same shapes in every step"
            )
        for own, each in zip(self.own, self.inputs, strict=True):
            own.copy_(_bytes(each))
        self.inputs = tuple(torch.empty_like(each, device="meta") for each in self.inputs)

    def show(self, leaf: Tensor) -> Tensor:
        """The full parameter over what was gathered, whose gradient goes to the engine's leaf."""
        if leaf.requires_grad:
            shown: Tensor = _Made.apply(leaf, self._make)
            return shown
        with torch.no_grad():
            return nn.Parameter(self._make(leaf.dtype), requires_grad=False)

    def _make(self, dtype: torch.dtype) -> Tensor:
        if not self.windows:
            self.windows = tuple(window_on(full) for full in self.full)
        for window, full in zip(self.windows, self.full, strict=True):
            move_window(window, full)
        outputs = tuple(
            window.view(-1).view(each).view(-1, *shape[1:])
            for window, (shape, each) in zip(self.windows, self.kinds, strict=True)
        )
        made, _ = self.local.fsdp_post_all_gather(outputs, self.metadata, dtype)
        result: Tensor = torch.as_strided(made, *self._outer(), storage_offset=0)
        return result


class _Made(torch.autograd.Function):
    """A tensor in the place of a leaf that has no values."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Callable[[torch.dtype], Tensor]) -> Tensor:
        return make(leaf.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if type(grad) is not Tensor:  # of the class of the parameter
            grad = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad, None


def note_extensions(group: Group) -> None:
    """Notes which of the group's parameters are some, and asks them what is gathered.

    Raises:
        AssertionError: one lacks a function, or does not do as FSDP2's interface says.
        NotImplementedError: one that is cut in another dimension than the first, or on the host.
    """
    for param in group.params:
        shard: Any = param.shard
        param.extension = None
        if hasattr(shard._local_tensor, _PRE) or hasattr(shard._local_tensor, _POST):
            _check(param, shard._local_tensor, group)
            param.extension = Extension(param, group)
            param.extension.ask()


def extensions_of(group: Group) -> list[Extension]:
    """Of the group's parameters, in their order."""
    return [param.extension for param in group.params if param.extension is not None]


def _check(param: RowParam, local: Tensor, group: Group) -> None:
    if not (hasattr(local, _PRE) and hasattr(local, _POST)):
        raise AssertionError(
            f"parameter '{param.fqn}': both {_PRE} and {_POST} should be defined if using "
            f"all-gather extensions; {type(local).__name__} has one of them"
        )
    if param.rows.dim != 0 or group.offloads:
        where = "lies on the host" if group.offloads else f"is cut in dimension {param.rows.dim}"
        raise NotImplementedError(
            f"parameter '{param.fqn}' has {_PRE} and {where}; shard it by rows on the device"
        )


def _bytes(tensor: Tensor) -> Tensor:
    """The rows of a tensor as bytes, 2-D."""
    rows = tensor.shape[0] if tensor.dim() else 1
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.view(rows, flat.numel() // rows if rows else 1)


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return mesh
    if names is None:
        raise AssertionError("mesh_dim_names are required for HSDP with all-gather extensions")
    return mesh[names[-1]]
