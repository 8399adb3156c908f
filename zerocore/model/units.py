"""The units of a model, which parameters are gathered together for which modules; chooses them.

Also predicts the order of their calls, before the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import _has_any_global_hook

from zerocore._C import CallEvent, ParamSpec
from zerocore.layout.place import PartOf
from zerocore.model.memory import tie_key
from zerocore.options.precision import BYTES, MixedPrecision, ParamTypes, gathered_types
from zerocore.tensor.placed import Placed
from zerocore.tensor.rows import local_part
from zerocore.tensor.wrapped import Wrapper, gathers_itself, is_wrapped, plain_part, wrapper_of

# Containers that are never called: the module around them uses their contents.
NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Two consecutive leftovers become one unit if one of them is smaller than this.
_SMALL_NBYTES = 1 << 20
# Consecutive blocks become one unit of at most this size: starting a message costs about as much.
JOINED_NBYTES = 1 << 20

UnitChoice = type[nn.Module] | str | nn.Module


@dataclass(eq=False)
class Param:
    """One parameter: its names, the modules that own it, and its two objects once it is sharded."""

    object: Any  # the one that programs see
    fqns: list[str]
    owners: list[tuple[nn.Module, str]]  # and its name in each
    # Of a part of a larger tensor: the ranks that hold all parts, the dimension along which these
    # are concatenated, and the range of this part, once known.
    larger: tuple[ProcessGroup, int] | None = field(default=None, init=False)
    part: PartOf | None = field(default=None, init=False)
    types: ParamTypes = field(init=False, repr=False)  # set by the collector
    spec: ParamSpec = field(init=False, repr=False)  # in the engine
    hidden: Any = field(default=None, init=False)  # the object that programs do not see

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    # -- before it is sharded --

    @property
    def tensor(self) -> Tensor:
        """The local tensor, a plain one. A subclass of several tensors is returned unchanged."""
        return plain_part(local_part(self.object))

    @property
    def wrapper(self) -> Wrapper | None:
        """The class around :attr:`tensor`."""
        return wrapper_of(local_part(self.object))

    @property
    def gathers_itself(self) -> bool:
        """Whether it has the two all-gather functions of FSDP2's interface."""
        return gathers_itself(self.fqn, local_part(self.object))

    @property
    def consists_of_several(self) -> bool:
        """Whether its class is around something other than one tensor like it."""
        return is_wrapped(local_part(self.object)) and self.wrapper is None

    @property
    def dtensor_spec(self) -> Any:
        """The DTensorSpec of a parameter that is a DTensor already; None of others."""
        return getattr(self.object, "_spec", None)

    def with_gather(self, types: ParamTypes, mixed: MixedPrecision | None) -> ParamTypes:
        """Returns its dtypes with the dtype of gathers; ValueError if this dtype cannot hold it."""
        if mixed is None or self.gathers_itself:
            return types
        return gathered_types(types, mixed, self.fqn, self.tensor.dim(), self.owners)

    # -- once it is sharded --

    @property
    def is_full(self) -> bool:
        """Whether programs see the full parameter in its object."""
        return not (isinstance(self.object, Placed) or hasattr(self.object, "_spec"))

    @property
    def is_whole(self) -> bool:
        """Whether programs always see the full parameter, at stage 0."""
        return getattr(self.shard, "is_whole", False)

    @property
    def shard(self) -> Any:
        """The ShardedParameter; a DTensor if shards are rows."""
        return self.hidden if self.is_full else self.object

    @property
    def whole_shape(self) -> torch.Size:
        """Its shape in ``state_dict()`` before sharding."""
        shard = self.shard
        return shard.shape if hasattr(shard, "_spec") else shard.place.whole_shape

    @property
    def full(self) -> Any:
        """The full parameter, which layers compute with."""
        return self.object if self.is_full else self.hidden

    @property
    def maker(self) -> Callable[[], Tensor] | None:
        """Makes a tensor like the full one, without its values; None if modules see a view."""
        return None if self.shard.make_view else self._make_like

    def _make_like(self) -> Tensor:
        like = self.full
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


class Encoded(NamedTuple):
    """Bytes that the engine gathers for a parameter that gathers itself."""

    spec: ParamSpec
    dtype: torch.dtype | None  # of the encoded tensor; None: the full parameter, not gathered
    types: ParamTypes = BYTES  # in the engine


@dataclass(eq=False)
class Unit:
    """Parameters gathered together while one of ``modules`` runs."""

    name: str
    modules: list[nn.Module]
    params: list[Param] = field(default_factory=list)
    several: list[Param] = field(default_factory=list)  # of several tensors, not sharded
    is_leftover: bool = False
    is_block: bool = False
    mesh: int = 0  # 0 is the model's mesh, the others are its parts'
    stays: bool = False  # unsharded from forward to backward
    near: bool = True  # later gathers come from the near ranks, if there are any
    extensions: list[Any] = field(default_factory=list)  # parameters that gather themselves
    # In the engine:
    index: int = field(default=-1, init=False)
    encoded: list[Encoded] = field(default_factory=list, init=False)  # behind the parameters
    views: list[Any] = field(default_factory=list, init=False)  # of others than plain tensors

    @property
    def nbytes(self) -> int:
        return sum(param.tensor.nbytes for param in self.params)

    @property
    def laid_out(self) -> list[Param | Encoded]:
        """The entries of the unit's layout, in order: parameters, and encoded ones."""
        return [*self.params, *self.encoded]


def choose_units(model: nn.Module, units: Sequence[UnitChoice] | None) -> list[Unit]:
    """Returns the units of ``model`` in order of registration.

    ``units`` has classes, class or module names, or modules that each become a unit; None finds the
    repeated blocks: lists of at least two children of one class, outermost lists first. Consecutive
    blocks then become one unit of at most 1 MiB.

    Raises:
        ValueError: nothing to shard, an entry that matches nothing, or units that overlap.
        TypeError: ``units`` is not a list, or an entry has another type.
    """
    if units is not None and (isinstance(units, str) or not isinstance(units, Iterable)):
        raise TypeError(
            "units must be a list such as ['Block'], of classes, class or module names, or "
            f"modules, got {units!r}"
        )
    params = collect_params(model)
    if not params:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    blocks = _find_blocks(model) if units is None else _resolve(model, units)
    planned = _make_units(model, blocks)
    chosen = set() if units is None else {id(block) for _, block in blocks}
    _assign(planned, model, params, chosen)
    return _merge_small([unit for unit in planned if unit.params], units is None)


def collect_params(model: nn.Module) -> list[Param]:
    """Returns every parameter once, with all names of tied ones, in order of registration.
    Parameters on the same memory, as after ``a.weight.data = b.weight.data``, are tied, too."""
    by_id: dict[int, Param] = {}
    keys: dict[object, Param] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, registered in module._parameters.items():
            if registered is None:
                continue
            param = by_id.get(id(registered))
            if param is None:
                param = keys.setdefault(tie_key(registered), Param(registered, [], []))
                by_id[id(registered)] = param
            fqn = f"{prefix}.{name}" if prefix else name
            if fqn not in param.fqns:
                param.fqns.append(fqn)
            if all(owner is not module or key != name for owner, key in param.owners):
                param.owners.append((module, name))
    return list(dict.fromkeys(by_id.values()))


def _find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    blocks: list[tuple[str, nn.Module]] = []
    chosen: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in chosen):
            continue
        children = list(module.named_children())
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        if is_list and len(children) > 1 and len({type(child) for _, child in children}) == 1:
            chosen.append(name)
            blocks += [(f"{name}.{key}" if name else key, child) for key, child in children]
    return [(name, block) for name, block in blocks if any(True for _ in block.parameters())]


def _resolve(model: nn.Module, units: Sequence[UnitChoice]) -> list[tuple[str, nn.Module]]:
    by_id = {id(module): name for name, module in model.named_modules()}
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for choice in units:
        if isinstance(choice, nn.Module):
            matches = [choice] if id(choice) in by_id else []
        elif isinstance(choice, str):
            matches = [m for n, m in model.named_modules() if choice in (n, type(m).__name__)]
        elif isinstance(choice, type):
            matches = [m for m in model.modules() if isinstance(m, choice)]
        else:
            raise TypeError(
                "units: expected classes, class or module names, or modules of the model, got "
                f"{choice!r}"
            )
        if not matches:
            raise ValueError(
                f"units: {choice!r} matches no module of {type(model).__name__}; expected a class, "
                "a class or module name, or a module of the model"
            )
        for module in matches:
            if id(module) in blocks:
                raise ValueError(
                    f"units overlap: '{by_id[id(module)]}' is chosen twice; name each module once"
                )
            blocks[id(module)] = (by_id[id(module)], module)
    return [blocks[key] for key in by_id if key in blocks]


def _make_units(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[Unit]:
    """Returns blocks, and every largest module without blocks in it, in order of registration."""
    block_ids = {id(block) for _, block in blocks}
    inside = {
        id(module)
        for module in model.modules()
        if any(id(inner) in block_ids for inner in module.modules() if inner is not module)
    }
    planned: list[Unit] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, in_block: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_block = id(module) in block_ids
        splits = id(module) in inside or module is model or isinstance(module, NOT_CALLED)
        if is_block:
            planned.append(Unit(name, [module], is_block=module is not model))
        elif not in_block and (module is model or not isinstance(module, NOT_CALLED)):
            leftover = id(module) not in inside and module is not model
            planned.append(Unit(name, [module], is_leftover=leftover))
        if splits or is_block:
            for key, child in module.named_children():
                visit(f"{name}.{key}" if name else key, child, in_block or is_block)

    visit("", model, False)
    return planned


def _assign(planned: list[Unit], model: nn.Module, params: list[Param], chosen: set[int]) -> None:
    """Gives each parameter to the innermost unit around it; tied ones get units of their own."""
    units_of = _units_of_modules(planned, model)
    tied: dict[tuple[int, ...], Unit] = {}
    for param in params:
        owners = sorted({unit for owner, _ in param.owners for unit in units_of[id(owner)]})
        if len(owners) == 1:
            planned[owners[0]].params.append(param)
            continue
        key = tuple(owners)
        if key not in tied:
            names = " + ".join(planned[i].name or "(root)" for i in owners)
            tied[key] = Unit(names, [planned[i].modules[0] for i in owners])
        tied[key].params.append(param)
    for unit in planned:
        if not unit.params and id(unit.modules[0]) in chosen and unit.modules[0] is not model:
            _check_not_covered(unit, planned)
    first_owners = [planned[key[0]] for key in tied]
    for owner, unit in zip(first_owners, tied.values(), strict=True):
        planned.insert(planned.index(owner), unit)


def _check_not_covered(unit: Unit, planned: list[Unit]) -> None:
    inner = [
        other.name
        for other in planned
        if other is not unit and other.modules[0] in set(unit.modules[0].modules())
    ]
    if inner and any(True for _ in unit.modules[0].parameters()):
        raise ValueError(
            f"units overlap: all parameters of '{unit.name}' belong to units inside it "
            f"({', '.join(inner)}); choose either the outer or the inner modules"
        )


def _units_of_modules(planned: list[Unit], model: nn.Module) -> dict[int, set[int]]:
    """Returns the innermost units around each module, several if units share it."""
    index = {id(unit.modules[0]): i for i, unit in enumerate(planned)}
    units_of: dict[int, set[int]] = {}

    def visit(module: nn.Module, current: int) -> None:
        current = index.get(id(module), current)
        units = units_of.setdefault(id(module), set())
        if current not in units:
            units.add(current)
            for child in module.children():
                visit(child, current)

    visit(model, 0)
    return units_of


def _merge_small(units: list[Unit], joins_blocks: bool) -> list[Unit]:
    """Joins consecutive small units: each unit costs at least two collectives a step."""
    merged: list[Unit] = []
    for unit in units:
        last = merged[-1] if merged else None
        if last is not None and _belong_together(last, unit, joins_blocks):
            if unit.is_block:  # there may be many: name the first and the last
                last.name = f"{last.name.partition(' to ')[0]} to {unit.name}"
            else:
                last.name = f"{last.name} + {unit.name}"
            last.modules += unit.modules
            last.params += unit.params
        else:
            merged.append(unit)
    for unit in merged:
        unit.name = unit.name or "(root)"
    return merged


def _belong_together(last: Unit, unit: Unit, joins_blocks: bool) -> bool:
    """Whether to join two units: leftovers if one is small, blocks if both together are small."""
    if last.is_leftover and unit.is_leftover:
        return min(last.nbytes, unit.nbytes) < _SMALL_NBYTES
    are_blocks = last.is_block and unit.is_block
    return joins_blocks and are_blocks and last.nbytes + unit.nbytes <= JOINED_NBYTES


UnitsOf = Mapping[int, tuple[int, ...]]
"""By id of a module: the units that its call enters."""


def call_order(models: Iterable[nn.Module], units_of: UnitsOf) -> list[CallEvent]:
    """Returns the enters and exits of units if modules are called in order of registration."""
    order: list[CallEvent] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        units = units_of.get(id(module), ())
        order.extend(CallEvent(True, unit) for unit in units)
        for child in module.children():
            visit(child)
        reads = backward_reads(module)
        order.extend(CallEvent(False, unit, reads=reads) for unit in units[::-1])

    for model in models:
        visit(model)
    return order


def backward_reads(module: nn.Module) -> bool:
    """Whether the backward of a call reads the module's parameters, by its class.

    An embedding's backward reads only indices. The class is the same on all ranks.
    """
    is_lookup = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return not (is_lookup and "weight" in module._parameters)  # it may be parametrized


def has_hooks(module: nn.Module) -> bool:
    """Whether a call runs hooks or a replaced ``forward``, besides the class's code."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    backward = module._backward_pre_hooks or module._backward_hooks
    return bool(before or after or backward or "forward" in vars(module) or _has_any_global_hook())


def units_by_module(units: Iterable[Sequence[nn.Module]]) -> UnitsOf:
    """Returns the units that each module enters, from the modules whose calls enter each unit."""
    entered: dict[int, tuple[int, ...]] = {}
    for index, modules in enumerate(units):
        for module in modules:
            entered[id(module)] = (*entered.get(id(module), ()), index)
    return entered
