"""A group of one ``fully_shard`` call: parameters that are gathered and reduced together.

The shards of those that gather themselves stay tensors of a class of their own; the engine reduces
their gradients like others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from zerocore._C import Engine
from zerocore.fsdp.mesh import DataMesh, device_of
from zerocore.fsdp.rows import LOCAL_TYPE, RowPlacement, shard_rows
from zerocore.model.extensions import Extension
from zerocore.model.memory import Extent, extent_of, tie_key
from zerocore.model.state import ShardState, drop_state
from zerocore.model.unit_call import UnitCall, note_unit_call
from zerocore.tensor.earlier import current, stands_for
from zerocore.tensor.placed import IS_ROWS, as_view
from zerocore.tensor.rows import forget_rows, local_part
from zerocore.tensor.shown import ShownView
from zerocore.tensor.wrapped import PRE, gathers_itself

PlacementOf = Callable[[nn.Parameter], tuple[Shard | None, DataMesh]]
_GROUP = "_zerocore_fsdp_group"
_ORIGIN = "_zerocore_fsdp_origin"  # on a parameter that was replaced by rows: what it was


@dataclass(eq=False)
class RowParam:
    """A parameter and where it is registered."""

    group: Group
    owners: list[tuple[nn.Module, str]]  # modules and the name in each; more than one if tied
    param: nn.Parameter  # of programs: a DTensor, but in full while modules compute with it
    fqn: str
    rows: RowPlacement  # which part of the parameter that is
    origin: object  # the same as another's if both were one parameter
    extent: Extent | None  # the memory that it had
    kind: type[nn.Parameter]  # the class that it had
    attributes: dict[str, Any]  # what was set on it
    local: torch.Tensor | None = None  # its memory in the engine, once there is one
    hidden: Any = None  # the object that it exchanges its tensor with then
    view: ShownView | None = None  # of the full one, if layers compute with that
    extension: Any = None  # where the parameter says itself what is gathered of it

    @property
    def name(self) -> str:
        """In the root."""
        return f"{self.group.path}.{self.fqn}" if self.group.path else self.fqn

    def registered(self) -> Any:
        """The entry of the first owner in its place, or what that stands for."""
        owner, name = self.owners[0]
        return current(owner._parameters.get(name))

    def is_in_place(self) -> bool:
        """Whether the engine and the modules have the same tensors."""
        found = self.registered()
        return (found is self.param or self._is_view(found)) and (
            self.shard._local_tensor is self.local
        )

    def _is_view(self, found: Any) -> bool:
        return found is not None and self.view is not None and found is self.view.view

    @property
    def is_full(self) -> bool:
        """Whether modules have the full parameter, or a view of it."""
        return not hasattr(self.param, "_spec") or self.registered() is not self.param

    @property
    def shard(self) -> Any:
        """The DTensor, which optimizers update."""
        return self.param if hasattr(self.param, "_spec") else self.hidden

    @property
    def is_viewed(self) -> bool:
        """Whether modules see another tensor than the engine's."""
        is_plain = self.rows.is_plain and LOCAL_TYPE not in self.attributes
        return self.extension is not None or not is_plain

    def make_view(self) -> torch.Tensor:
        """The tensor that layers compute with, with attributes of the parameter."""
        with torch.enable_grad():  # a backward that computes a call once more records, too
            shown = (self.rows if self.extension is None else self.extension).show(self.hidden)
        vars(as_view(shown, self.hidden)).update(self.attributes)
        return shown

    def take_registered(self) -> None:
        """Another parameter may have been put in its place (a load that assigns, ``to_empty``);
        raises ValueError if it is no DTensor of the same shape on the same mesh."""
        found = self.registered()
        if self._is_view(found):
            return
        if found is self.param:
            found = self.shard
        old: Any = self.shard
        if not isinstance(found, DTensor) or (
            (found.shape, found.placements, found.device_mesh)
            != (old.shape, old.placements, old.device_mesh)
        ):
            raise ValueError(
                f"parameter '{self.fqn}' was replaced by {type(found).__name__} of shape "
                f"{list(getattr(found, 'shape', ()))}; expected a DTensor of shape "
                f"{list(old.shape)}, {old.placements}. Load the state dict of a model that was "
                "sharded alike, or set values in place"
            )
        assert isinstance(found, nn.Parameter)
        if found is not old:
            self.param = found


class Root:
    """A module that is called from outside, and all groups below it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.module = group.modules[0]
        self.state: ShardState | None = None
        self.is_provisional = True  # another one may be called later
        self.is_manual = False  # backwards are finalized by the program
        self.extensions: list[Extension] = []  # of all groups, with the state
        self.groups = groups_below(*group.modules)
        for name, inner in self.groups:
            if inner.root is not None and not inner.root.is_provisional:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
        for _, inner in self.groups:
            if inner.root is not None:
                inner.root.release()
            inner.root = self

    def settle(self) -> None:
        """It is the root; raises RuntimeError if it is a group of several modules."""
        modules = self.group.modules
        if self.is_provisional and len(modules) > 1:
            names = ", ".join(type(module).__name__ for module in modules)
            raise RuntimeError(f"FSDP requires a single root module but got [{names}]")
        self.is_provisional = False

    def params(self) -> list[RowParam]:
        """Those of all groups, in the order of the units."""
        return [param for _, group in self.groups for param in group.params]

    def with_params(self) -> list[Group]:
        """The groups that are units of the engine, in their order."""
        return [group for _, group in self.groups if group.params]

    def release(self) -> None:
        """Drops the engine: modules show DTensors, which keep their values."""
        if self.state is None:
            return
        self.state.finish_reads()
        self.state.engine.reset()
        self.state = None
        drop_state(self.module)
        for _, group in self.groups:
            group.unit_call = None
            for module in group.modules:
                note_unit_call(module, None)
        for param in self.params():
            forget_rows(param.param, param.hidden)
            param.hidden = param.view = param.local = param.extension = None


@dataclass(eq=False)
class Group:
    """Parameters, the modules whose calls gather them, and what may be set for them."""

    modules: list[nn.Module]
    data: DataMesh
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None  # None: unless it is the root's
    num_near: int = 1  # ranks that gather again from each other; 1 for none
    offloads: bool = False  # parameters and gradients lie on the host between calls
    params: list[RowParam] = field(default_factory=list)
    reshard_after_backward: bool = True
    reduces: bool = True
    reduces_across: bool = True  # over replicas, too
    divide_factor: float | None = None
    overlaps_reductions: bool = True
    all_gather: Any = None  # the program's own, in torch's interface
    reduce_scatter: Any = None
    after_reduce: Callable[[torch.Tensor], None] | None = None
    max_input_buffers: int = 1  # a hint that readers of FSDP2's state see
    root: Root | None = None
    path: str = ""  # of its first module in the root
    unit: int = -1  # in the root's engine; -1 without parameters
    unit_call: UnitCall | None = None  # with the engine
    siblings: list[Group] = field(default_factory=list)  # of the same call, over other meshes
    state: Any = None  # what readers of FSDP2's state are given, see state.py

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that its parameters are sharded over, and their replicas."""
        return self.data.mesh

    @property
    def engine(self) -> Engine | None:
        """That of the root's state, once there is one."""
        state = None if self.root is None else self.root.state
        return None if state is None else state.engine

    @property
    def shard_device(self) -> torch.device:
        """Where parameters and gradients lie between calls."""
        return torch.device("cpu") if self.offloads else device_of(self.mesh)

    @property
    def syncs(self) -> bool:
        """Whether a backward leaves gradients that all ranks agree on."""
        return self.reduces and (self.reduces_across or self.mesh.ndim == 1)

    @property
    def stays(self) -> bool:
        """Whether parameters stay unsharded from forward to backward."""
        if self.reshard_after_forward is None:
            return self.root is not None and self.root.group is self
        return not self.reshard_after_forward

    @property
    def is_unsharded(self) -> bool:
        """Whether modules have the full parameters."""
        return any(param.is_full for param in self.params)

    def shard_params(self, ignored: set[nn.Parameter], placement_of: PlacementOf) -> None:
        """Puts DTensors in the place of all parameters that belong to the group; those that
        ``placement_of`` puts on another mesh become a sibling's. Raises ValueError, AssertionError
        or NotImplementedError for a parameter that cannot be sharded, by name."""
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        names: dict[nn.Parameter, str] = {}
        tied: dict[object, nn.Parameter] = {}
        for name, module in _managed_modules(self.modules):
            for key, each in module._parameters.items():
                if each is not None and each not in ignored:
                    param = tied.setdefault(tie_key(each), each)
                    owners.setdefault(param, []).append((module, key))
                    names.setdefault(param, f"{name}.{key}" if name else key)
        for param in owners:
            _check_param(param, names[param])
        made = []  # none is replaced unless all can be
        for param in owners:
            placement, data = placement_of(param)
            made.append(
                (data, *shard_rows(param, names[param], data, placement, self.shard_device))
            )
        for (param, places), (data, shard, rows) in zip(owners.items(), made, strict=True):
            attributes = _attributes_of(param)
            origin = param.__dict__.setdefault(_ORIGIN, object())
            extent = extent_of(local_part(param))
            vars(shard).update(attributes)
            vars(shard).pop(LOCAL_TYPE, None)  # of what modules see
            shard.__dict__[IS_ROWS] = True
            for owner, key in places:
                owner._parameters[key] = shard
            facts = names[param], rows, origin, extent, type(param), attributes
            group = self._over(data)
            group.params.append(RowParam(group, places, shard, *facts))
            stands_for(param, names[param], shard)

    def _over(self, data: DataMesh) -> Group:
        """The group of this call over a mesh; a new sibling if need be."""
        found = [group for group in (self, *self.siblings) if group.mesh == data.mesh]
        if not found:
            found = [replace(self, data=data, params=[], siblings=[])]
            self.siblings += found
        return found[0]

    def move_buffers(self) -> None:
        """Buffers go to the device; those on the meta device stay."""
        device = device_of(self.mesh)
        for _, module in _managed_modules(self.modules):
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    module._buffers[key] = buffer.to(device)


def group_of(module: nn.Module) -> Group | None:
    """The group of a module that ``fully_shard`` was called with, else None."""
    return module.__dict__.get(_GROUP)


def set_group(module: nn.Module, group: Group) -> None:
    """``module`` is one of ``group.modules`` from now on."""
    module.__dict__[_GROUP] = group
    # DDP asks for it, and leaves the module alone.
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def groups_below(*modules: nn.Module) -> list[tuple[str, Group]]:
    """The groups of the modules and of those in them, each once with its first name. A sibling
    follows the group of the same call."""
    found: dict[Group, str] = {}
    for module in modules:
        for name, inner in module.named_modules():
            group = group_of(inner)
            for each in () if group is None else (group, *group.siblings):
                found.setdefault(each, name)
    return [(name, group) for group, name in found.items()]


def _managed_modules(roots: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules whose parameters belong to a group: not those below another group's."""
    found: dict[nn.Module, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        if module in found:
            return
        others = (group_of(module), "replicate" in module.__dict__.get(REGISTRY_KEY, ()))
        if module not in roots and any(others):
            return
        found[module] = name
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    for root in roots:
        visit("", root)
    return [(name, module) for module, name in found.items()]


def _attributes_of(param: nn.Parameter) -> dict[str, Any]:
    """Attributes that were set on it; none of a tensor around others, where they are these."""
    if hasattr(param, "__tensor_flatten__") and not isinstance(param, DTensor):
        return {}
    return {key: value for key, value in vars(param).items() if key != _ORIGIN}


def _check_param(param: nn.Parameter, name: str) -> None:
    if IS_ROWS in vars(param):
        raise ValueError(
            f"fully_shard: parameter '{name}' is sharded by a call for another module, which has "
            "its module, too. Shard both in one call: fully_shard([module_a, module_b])."
        )
    if param.dim() == 0:
        raise ValueError(
            f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with "
            "numel equal to 1."
        )
    if not param.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters: '{name}' of shape "
            f"{list(param.shape)} has strides {list(param.stride())}"
        )


def note_extensions(group: Group) -> None:
    """Notes which of the group's parameters are some, and asks them what is gathered. Raises
    AssertionError if one does not do as FSDP2's interface says, NotImplementedError for one that is
    cut in another dimension than the first, or on the host."""
    for param in group.params:
        shard: Any = param.shard
        param.extension = None
        if gathers_itself(param.fqn, shard._local_tensor):
            if param.rows.dim != 0 or group.offloads:
                where = f"is cut in dimension {param.rows.dim}"
                where = "lies on the host" if group.offloads else where
                raise NotImplementedError(
                    f"parameter '{param.fqn}' has {PRE} and {where}; shard it by rows on the device"
                )
            mesh, module = _shard_mesh(group.mesh), param.owners[0][0]
            param.extension = Extension(
                param.name, shard._local_tensor, module, mesh, group.policy, param.rows.shape
            )
            param.extension.ask()


def extensions_of(group: Group) -> list[Extension]:
    """Of the group's parameters, in their order."""
    return [param.extension for param in group.params if param.extension is not None]


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return mesh
    if names is None:
        raise AssertionError("mesh_dim_names are required for HSDP with all-gather extensions")
    return mesh[names[-1]]
