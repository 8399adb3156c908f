"""A group of one ``fully_shard`` call: parameters that are gathered and reduced together.

Shards of parameters that gather themselves keep their class; the engine reduces their gradients
as it does others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from zerocore._C import Engine
from zerocore.fsdp.mesh import DataMesh, device_of
from zerocore.fsdp.policy import wire_dtype_of
from zerocore.fsdp.rows import LOCAL_TYPE, RowPlacement, shard_rows
from zerocore.model.memory import Extent, extent_of, tie_key
from zerocore.model.state import ShardState, drop_state
from zerocore.model.unit_call import note_unit_call
from zerocore.model.units import Param
from zerocore.options.precision import MixedPrecision, ParamTypes, gathered_types
from zerocore.tensor.earlier import current, stands_for
from zerocore.tensor.placed import IS_ROWS, as_view
from zerocore.tensor.rows import forget_rows, local_part
from zerocore.tensor.shown import ShownView

PlacementOf = Callable[[nn.Parameter], tuple[Shard | None, DataMesh]]
_GROUP = "_zerocore_fsdp_group"
_ORIGIN = "_zerocore_fsdp_origin"  # set on a parameter that rows replace: its identity


@dataclass(eq=False)
class RowParam(Param):
    """A parameter of a group. Programs see a DTensor, or the full one while modules compute."""

    group: Group
    rows: RowPlacement  # this rank's part
    origin: object  # equal for parameters that were one before sharding
    extent: Extent | None  # its memory before sharding
    kind: type[nn.Parameter]  # its class before sharding
    attributes: dict[str, Any]  # attributes that the program had set on it
    local: torch.Tensor | None = None  # its memory in the engine, once there is an engine
    view: ShownView | None = None  # a view of the full one, if layers compute with a view
    extension: Any = None  # of a parameter that gathers itself

    def registered(self) -> Any:
        """Returns the parameter that its first owner holds now."""
        owner, name = self.owners[0]
        return current(owner._parameters.get(name))

    def is_in_place(self) -> bool:
        """Whether the engine and the modules have the same tensors."""
        registered, shard = self.registered(), self.object
        if not hasattr(shard, "_spec"):  # not by ``shard``: each root call asks all parameters
            shard = self.hidden
        is_held = registered is self.object or self._is_view(registered)
        return is_held and shard._local_tensor is self.local

    def _is_view(self, value: Any) -> bool:
        return value is not None and self.view is not None and value is self.view.view

    @property
    def is_unsharded(self) -> bool:
        """Whether modules have the full parameter, or a view of it."""
        return self.is_full or self.registered() is not self.object

    @property
    def is_viewed(self) -> bool:
        """Whether modules see a view in place of the engine's tensor."""
        is_plain = self.rows.is_plain and LOCAL_TYPE not in self.attributes
        return self.extension is not None or not is_plain

    def make_view(self) -> torch.Tensor:
        """Makes the view that layers compute with; it has the parameter's attributes."""
        with torch.enable_grad():  # recomputation within a backward records it, too
            shown = (self.rows if self.extension is None else self.extension).show(self.hidden)
        vars(as_view(shown, self.hidden)).update(self.attributes)
        return shown

    def find_types(self) -> ParamTypes:
        """Returns its dtypes under the group's policy. Raises ValueError if ``gather_dtype`` cannot
        hold it, NotImplementedError for a ``gather_dtype`` of parameters on the host."""
        dtype, policy = self.shard.dtype, self.group.policy
        if not dtype.is_floating_point:
            return ParamTypes(dtype, dtype, dtype, dtype)
        model = policy.param_dtype or dtype
        main = dtype if self.extension is None else model  # the shard is the main weight
        grad = self.shard.grad_dtype or dtype
        reduce = wire_dtype_of(policy) or policy.reduce_dtype or (model if grad == dtype else grad)
        types, gather = ParamTypes(model, main, reduce, grad), getattr(policy, "gather_dtype", None)
        if gather is None or self.extension is not None:
            return types
        if self.group.offloads:
            raise NotImplementedError(
                f"parameter '{self.fqn}': gather_dtype={gather} does not support parameters on the "
                "host; leave out gather_dtype= or offload_policy="
            )
        mixed = MixedPrecision(gather_dtype=gather)
        return gathered_types(types, mixed, self.fqn, len(self.rows.shape), self.owners)

    @property
    def maker(self) -> Callable[[], torch.Tensor] | None:
        if self.extension is not None or self.rows.whole is not None or self.rows.sums:
            return None
        dtype, device = self.find_types().model, device_of(self.group.mesh)
        return partial(torch.empty, self.shard.shape, dtype=dtype, device=device)

    def take_registered(self) -> None:
        """Adopts a parameter that the program has registered instead (a load with ``assign=True``,
        ``to_empty``). Raises ValueError if it is not a DTensor of the same shape and mesh."""
        new = self.registered()
        if self._is_view(new):
            return
        if new is self.object:
            new = self.shard
        old: Any = self.shard
        if not isinstance(new, DTensor) or (
            (new.shape, new.placements, new.device_mesh)
            != (old.shape, old.placements, old.device_mesh)
        ):
            raise ValueError(
                f"parameter '{self.fqn}' was replaced by {type(new).__name__} of shape "
                f"{list(getattr(new, 'shape', ()))}; expected a DTensor of shape "
                f"{list(old.shape)}, {old.placements}. Load the state dict of a model that was "
                "sharded alike, or set values in place"
            )
        assert isinstance(new, nn.Parameter)
        if new is not old:
            self.object = new
            for owner, name in self.owners[1:]:  # as FSDP2 does: the first one's is shared again
                owner._parameters[name] = new


class Root:
    """A root module, which programs call, and all groups in it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.module = group.modules[0]
        self.state: ShardState | None = None
        self.is_provisional = True  # another root may be called later
        self.is_manual = False  # the program finalizes backwards
        names = groups_below(*group.modules)
        for inner, name in names.items():
            if inner.root is not None and not inner.root.is_provisional:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
        for inner, name in names.items():
            if inner.root is not None:
                inner.root.release()
            inner.root, inner.path = self, name
        self.groups = list(names)
        self.units = [inner for inner in self.groups if inner.params]  # the engine's, in order
        for number, inner in enumerate(self.units):
            inner.unit = number
        self._name_params()

    def _name_params(self) -> None:
        """Names parameters as in the root; before, they have their names in their groups."""
        prefixes: dict[nn.Module, list[str]] = {}
        for module in self.group.modules:
            for name, inner in module.named_modules(remove_duplicate=False):
                prefixes.setdefault(inner, []).append(f"{name}." if name else "")
        for param in self.params():
            names = [pre + key for owner, key in param.owners for pre in prefixes.get(owner, ())]
            param.fqns = list(dict.fromkeys(names)) or param.fqns

    def settle(self) -> None:
        """Makes it the final root; raises RuntimeError if its group has several modules."""
        modules = self.group.modules
        if self.is_provisional and len(modules) > 1:
            names = ", ".join(type(module).__name__ for module in modules)
            raise RuntimeError(f"FSDP requires a single root module but got [{names}]")
        self.is_provisional = False

    def params(self) -> list[RowParam]:
        """Returns the parameters of all groups, in the order of the units."""
        return [param for group in self.units for param in group.params]

    def release(self) -> None:
        """Drops the engine; modules then show DTensors with the current values."""
        if self.state is None:
            return
        self.state.finish_reads()
        self.state.engine.reset()
        self.state = None
        drop_state(self.module)
        for group in self.groups:
            for module in group.modules:
                note_unit_call(module, None)
        for param in self.params():
            forget_rows(param.object, param.hidden)
            param.hidden = param.view = param.local = param.extension = None


@dataclass(eq=False)
class Group:
    """Parameters, the modules whose calls unshard them, and their settings."""

    modules: list[nn.Module]
    data: DataMesh
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None  # None: True unless it is the root's group
    num_near: int = 1  # near ranks, from which later gathers come; 1 for none
    offloads: bool = False  # parameters and gradients are on the host between calls
    params: list[RowParam] = field(default_factory=list)
    reshard_after_backward: bool = True
    reduces: bool = True
    reduces_across: bool = True  # over replicas, too
    divide_factor: float | None = None
    overlaps_reductions: bool = True
    # The program's own collectives, and its hook.
    gather: Callable[[torch.Tensor, torch.Tensor], Any] | None = None
    reduce: Callable[[torch.Tensor, torch.Tensor], Any] | None = None
    after_reduce: Callable[[torch.Tensor], None] | None = None
    max_input_buffers: int = 1  # only readers of FSDP2's state see it
    root: Root | None = None
    path: str = ""  # of its first module in the root
    unit: int = -1  # index in the root's engine; -1 without a root or parameters
    siblings: list[Group] = field(default_factory=list)  # of the same call, over other meshes
    state: Any = None  # the state for readers of FSDP2's state, see state.py

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that its parameters are sharded over, and their replicas."""
        return self.data.mesh

    @property
    def engine(self) -> Engine | None:
        """The engine of the root's state, once there is one."""
        state = None if self.root is None else self.root.state
        return None if state is None else state.engine

    @property
    def shard_device(self) -> torch.device:
        """The device of parameters and gradients between calls."""
        return torch.device("cpu") if self.offloads else device_of(self.mesh)

    @property
    def syncs(self) -> bool:
        """Whether a backward reduces gradients over all ranks."""
        return self.reduces and (self.reduces_across or self.mesh.ndim == 1)

    @property
    def is_sibling(self) -> bool:
        """Whether the group of its call enters its unit."""
        return group_of(self.modules[0]) is not self

    @property
    def stays(self) -> bool:
        """Whether parameters stay unsharded from forward to backward."""
        if self.reshard_after_forward is None:
            return self.root is not None and self.root.group is self
        return not self.reshard_after_forward

    @property
    def is_unsharded(self) -> bool:
        """Whether modules have full parameters."""
        return any(param.is_unsharded for param in self.params)

    def shard_params(self, ignored: set[nn.Parameter], placement_of: PlacementOf) -> None:
        """Replaces all parameters of the group by DTensors. A parameter that ``placement_of`` puts
        on another mesh goes to a sibling group. Raises ValueError, AssertionError or
        NotImplementedError, with a parameter's name, if it cannot be sharded."""
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        names: dict[nn.Parameter, str] = {}
        tied: dict[object, nn.Parameter] = {}
        for name, module in _managed_modules(self.modules):
            for key, registered in module._parameters.items():
                if registered is not None and registered not in ignored:
                    param = tied.setdefault(tie_key(registered), registered)
                    owners.setdefault(param, []).append((module, key))
                    names.setdefault(param, f"{name}.{key}" if name else key)
        for param in owners:
            _check_param(param, names[param])
        shards = []  # all are made before any parameter is replaced, as one may raise
        for param in owners:
            placement, data = placement_of(param)
            shards.append(
                (data, *shard_rows(param, names[param], data, placement, self.shard_device))
            )
        for (param, places), (data, shard, rows) in zip(owners.items(), shards, strict=True):
            attributes = _attributes_of(param)
            origin = param.__dict__.setdefault(_ORIGIN, object())
            extent = extent_of(local_part(param))
            vars(shard).update(attributes)
            vars(shard).pop(LOCAL_TYPE, None)  # it describes the tensor that modules see
            shard.__dict__[IS_ROWS] = True
            for owner, key in places:
                owner._parameters[key] = shard
            group = self._over(data)
            facts = group, rows, origin, extent, type(param), attributes
            group.params.append(RowParam(shard, [names[param]], places, *facts))
            stands_for(param, names[param], shard)

    def _over(self, data: DataMesh) -> Group:
        """Returns this call's group over a mesh; makes a sibling if need be."""
        matches = [group for group in (self, *self.siblings) if group.mesh == data.mesh]
        if not matches:
            matches = [replace(self, data=data, params=[], siblings=[])]
            self.siblings += matches
        return matches[0]

    def move_buffers(self) -> None:
        """Moves buffers to the device; leaves meta buffers alone."""
        device = device_of(self.mesh)
        for _, module in _managed_modules(self.modules):
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    module._buffers[key] = buffer.to(device)


def group_of(module: nn.Module) -> Group | None:
    """Returns the group of a module that was passed to ``fully_shard``, else None."""
    return module.__dict__.get(_GROUP)


def set_group(module: nn.Module, group: Group) -> None:
    """Sets the result of :func:`group_of`."""
    module.__dict__[_GROUP] = group
    # DDP reads the registry, and then ignores the module's parameters.
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def groups_below(*modules: nn.Module) -> dict[Group, str]:
    """Returns the groups of the modules and their submodules, each with its first name. A sibling
    follows the group of its call."""
    names: dict[Group, str] = {}
    for module in modules:
        for name, inner in module.named_modules():
            group = group_of(inner)
            for part in () if group is None else (group, *group.siblings):
                names.setdefault(part, name)
    return names


def _managed_modules(roots: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Returns the modules whose parameters belong to a group: none below another group's module."""
    names: dict[nn.Module, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        if module in names:
            return
        managers = (group_of(module), "replicate" in module.__dict__.get(REGISTRY_KEY, ()))
        if module not in roots and any(managers):
            return
        names[module] = name
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    for root in roots:
        visit("", root)
    return [(name, module) for module, name in names.items()]


def _attributes_of(param: nn.Parameter) -> dict[str, Any]:
    """Returns a parameter's attributes of the program; none of a class that has tensors as such."""
    if hasattr(param, "__tensor_flatten__") and not isinstance(param, DTensor):
        return {}
    return {key: value for key, value in vars(param).items() if key != _ORIGIN}


def _check_param(param: nn.Parameter, name: str) -> None:
    if IS_ROWS in vars(param):
        raise ValueError(
            f"fully_shard: parameter '{name}' is sharded already, by a call for another module "
            "that shares its module. Shard both in one call: fully_shard([module_a, module_b])."
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
