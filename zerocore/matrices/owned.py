"""Runs any optimizer on whole parameters: each parameter is updated by the rank that owns it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zerocore.common.agreement import agree, gather_objects, together
from zerocore.hooks.first_states import stepped
from zerocore.hooks.optimizer_states import options_of, params_of, without_state
from zerocore.hooks.optimizer_steps import ShardOptimizer
from zerocore.matrices.exchange import Arrival, Choice, Lanes, RoundExchange, choice_of
from zerocore.matrices.ownership import Matrix, Round, assign, make_rounds, whole_cost
from zerocore.matrices.parameters import (
    Used,
    Whole,
    check_is_whole,
    check_sharded,
    groups_of,
    name_of,
    plan_of,
    used_in_step,
)
from zerocore.model.parameter_meshes import check_has_places


def owned(optimizer_class: type[Optimizer], params: Any, **options: Any) -> OwnedOptimizer:
    """Makes an optimizer that gets each full parameter and gradient on the rank that owns it.

    Use it for optimizers whose update of a parameter needs the whole parameter but no other (SOAP,
    Shampoo, ``torch.optim.Muon``, Adafactor). Their states stay on the owner. All ranks must build
    it, and call ``step()``, ``state_dict()`` and ``load_state_dict()`` together.

    Args:
        optimizer_class: any subclass of ``torch.optim.Optimizer``.
        params: parameters of one sharded model, ``(name, parameter)`` pairs, or dicts of groups.
        options: options of ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` is not an optimizer, or does not take ``options``.
        ValueError: its ``step`` needs a closure, it rejects a parameter, or the parameters do not
            belong to one sharded model. The message names the parameter.
        RuntimeError: another rank failed, or got other parameters.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"owned: expected a class of torch.optim, got {optimizer_class!r}")
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"owned: the step of {optimizer_class.__name__} needs a closure, which it calls "
            "several times; each rank would call it as often as its own parameters need. Use an "
            "optimizer that takes one gradient a step"
        )
    return OwnedOptimizer(optimizer_class, params, options)


class OwnedOptimizer(ShardOptimizer):
    """The result of :func:`owned`: an optimizer of shards around an optimizer of full parameters.

    ``param_groups`` hold the shards and the options; the next step uses changed options.
    ``state_dict()`` returns what ``optimizer_class`` returns in one process, on each rank's CPU.

    Attributes:
        inner: the optimizer of the full parameters that this rank owns.
    """

    moves_matrices = True

    def __init__(
        self, optimizer_class: type[Optimizer], params: Any, options: dict[str, Any]
    ) -> None:
        groups = groups_of(params)
        name = f"owned({optimizer_class.__name__})"
        self._model = check_sharded(groups, name)
        self._name, self._class, self._options = name, optimizer_class, options
        self._lanes = [Lanes.of(self._model, mesh) for mesh in range(len(self._model.meshes))]
        self._loads = [[0] * lanes.grid.num_ranks for lanes in self._lanes]
        self._owners: dict[int, int] = {}  # rank in the mesh, by the parameter's number
        self._known: list[Whole] = []
        self._whole: dict[int, nn.Parameter] = {}  # full ones that this rank owns, by number
        self._rounds: dict[Used, list[RoundExchange]] = {}
        super().__init__(groups, {})
        for param in params_of(self):
            check_is_whole(param, name)
        facts = [f"'{name_of(param)}' for {name}" for param in params_of(self)]
        agree(self._model.ranks.groups, None, facts, self._model.device)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._own(range(len(facts)))
        with together(self._model.ranks.groups, self._model.device):
            self.inner = self._make_inner()
        self.defaults = self.inner.defaults
        self._take_options(0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as ``torch.optim.Optimizer.add_param_group`` does; all ranks must call."""
        if not hasattr(self, "inner"):  # the base class's constructor calls this
            super().add_param_group(param_group)
            return
        [group] = groups_of([param_group])
        check_sharded([group], self._name, self._model)
        begin, number = len(params_of(self)), len(self.param_groups)
        super().add_param_group(group)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._own(range(begin, len(params_of(self))))
        self.inner.add_param_group(self._inner_group(self.param_groups[number], begin))
        self._release()
        self._take_options(number)

    def _own(self, numbers: range) -> None:
        """Gives each of these parameters an owner: trainable ones first, larger ones first."""
        params = params_of(self)
        self._known = known = [Whole.of(param) for param in params]
        costs = {number: whole_cost(known[number].place.global_shape) for number in numbers}
        ordered = sorted(costs, key=lambda n: (not params[n].requires_grad, -costs[n], n))
        self._rounds = {}
        for mesh, lanes in enumerate(self._lanes):
            of_mesh = [number for number in ordered if known[number].mesh == mesh]
            owners = assign([costs[n] for n in of_mesh], self._loads[mesh])
            self._owners.update(zip(of_mesh, owners, strict=True))
            for number in (n for n in of_mesh if self._owners[n] == lanes.rank):
                full = known[number].place.like_full(known[number].elements())
                full = full.to(self._model.device)  # a shard may be on the host
                self._whole[number] = nn.Parameter(full, params[number].requires_grad)
        self._gather([number in costs for number in range(len(params))], Whole.elements, "data")

    def _make_inner(self) -> Optimizer:
        begin, groups = 0, []
        for group in self.param_groups:
            groups.append(self._inner_group(group, begin))
            begin += len(group["params"])
        try:
            return self._class(groups, **self._options)
        except (TypeError, ValueError, RuntimeError) as error:
            self._blame(error)
            raise
        finally:
            self._release()

    def _blame(self, error: Exception) -> None:
        """Raises the error with a parameter's name, if the class rejects one parameter alone."""
        params = params_of(self)
        for number, whole in sorted(self._whole.items()):
            try:
                self._class([whole], **self._options)
            except (TypeError, ValueError, RuntimeError) as caught:
                fqn = name_of(params[number])
                raise type(error)(f"{self._name} rejects parameter '{fqn}': {caught}") from error

    def _inner_group(self, group: Mapping[str, Any], begin: int) -> dict[str, Any]:
        """Returns the inner optimizer's group: the same options, and this rank's own parameters."""
        numbers = range(begin, begin + len(group["params"]))
        wholes = [self._whole[n] for n in numbers if n in self._whole]
        return {**options_of(group), "params": wholes}

    def _take_options(self, first: int) -> None:
        """Copies the inner groups' options, in which the class has filled in defaults."""
        for group, inner in zip(
            self.param_groups[first:], self.inner.param_groups[first:], strict=True
        ):
            group.update(options_of(inner))

    def _update(self) -> None:
        """Takes a step; raises ValueError on every rank if a gradient is missing on some ranks."""
        self._follow_model()
        used = used_in_step(self._model, self._name, params_of(self))
        with torch._C.DisableTorchFunctionSubclass():
            self._gather(used, Whole.elements, "data")
            # torch's optimizers need gradients in the parameter's dtype.
            self._gather(used, lambda w: w.elements(w.param.grad).to(w.param.dtype), "grad")
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(options_of(group))
        self.inner.step()
        self._take_options(0)
        with torch._C.DisableTorchFunctionSubclass():
            self._scatter(used)
            self._release()

    def _follow_model(self) -> None:
        """Takes the model's new state if ``zerocore.fsdp`` has made its engine again."""
        if (state := check_sharded(self.param_groups, self._name)) is not self._model:
            self._model, self._rounds = state, {}
            self._lanes = [Lanes.of(state, mesh) for mesh in range(len(state.meshes))]
            self._known = [Whole.of(param) for param in params_of(self)]

    def _gather(self, used: Sequence[bool], read: Callable[[Whole], Tensor], name: str) -> None:
        """Gathers the values of ``read`` into an attribute of the parameters owned here."""

        def send(exchange: RoundExchange) -> Arrival:
            return exchange.to_owners([read(self._known[m.param]) for m in exchange.step.matrices])

        for step, arrived in self._one_ahead(used, send):
            for index, flat in zip(step.mine, arrived(), strict=True):
                number = step.matrices[index].param
                setattr(self._whole[number], name, self._known[number].place.full_of(flat))

    def _scatter(self, used: Sequence[bool]) -> None:
        """Sends every rank its elements of the parameters that the owners have updated."""

        def send(exchange: RoundExchange) -> Arrival:
            numbers = [exchange.step.matrices[index].param for index in exchange.step.mine]
            flat = [self._known[n].place.flat(self._whole[n].detach()) for n in numbers]
            return exchange.to_shards(flat)

        for step, arrived in self._one_ahead(used, send):
            for matrix, part in zip(step.matrices, arrived(), strict=True):
                self._known[matrix.param].elements().copy_(part)

    def _one_ahead(
        self, used: Sequence[bool], send: Callable[[RoundExchange], Arrival]
    ) -> Iterator[tuple[Round, Arrival]]:
        """Yields each round when the next one is in flight."""
        rounds = self._rounds_of(used)
        sent = ((exchange.step, send(exchange)) for exchange in rounds)
        return (current for current, _ in pairwise(chain(sent, [None])) if current is not None)

    def _release(self) -> None:
        """Frees the full parameters' memory and gradients; they keep their shapes."""
        for whole in self._whole.values():
            whole.data = whole.new_empty(()).expand(whole.shape)
            whole.grad = None

    def _rounds_of(self, used: Sequence[bool]) -> list[RoundExchange]:
        """Returns the rounds for the parameters in use, each of one mesh and dtype."""
        return plan_of(tuple(used), self._rounds, lambda: self._make_rounds(used))

    def _make_rounds(self, used: Sequence[bool]) -> list[RoundExchange]:
        alike: dict[tuple[int, str], list[int]] = {}
        for number in (number for number, is_used in enumerate(used) if is_used):
            whole = self._known[number]
            alike.setdefault((whole.mesh, str(whole.param.dtype)), []).append(number)
        rounds: list[RoundExchange] = []
        for (mesh, _), numbers in sorted(alike.items()):  # the same order on all ranks
            lanes, dtype = self._lanes[mesh], self._known[numbers[0]].param.dtype
            shapes = [self._known[number].place.global_shape for number in numbers]
            matrices = [
                Matrix(number, 0, shape.numel(), shape, whole_cost(shape))
                for number, shape in zip(numbers, shapes, strict=True)
            ]
            cuts = {n: lanes.cut(self._known[n].shard) for n in numbers}
            owners = [self._owners[number] for number in numbers]
            steps = make_rounds(matrices, owners, cuts, lanes.grid, lanes.rank, dtype.itemsize)
            like = torch.empty(0, dtype=dtype, device=self._model.device)
            rounds += [RoundExchange(step, lanes, like) for step in steps]
        return rounds

    def describe(self) -> Choice:
        """Returns each parameter's owner, and the bytes of a step in which all have gradients."""
        params = params_of(self)
        rounds = self._rounds_of([param.requires_grad for param in params])
        names = [name_of(param) for param in params]
        # Owners get weights and gradients.
        return choice_of(self._name, rounds, names, [], self._model.ranks, times_to_owners=2)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of one process, with tensors on the CPU; all ranks must call.

        Raises:
            ValueError: ranks outside of a mesh have another parameter with the name of one in it.
        """
        if any(whole.mesh for whole in self._known):
            check_has_places(self._model)
        packed = super().state_dict()
        inner = self.inner.state_dict()["state"]
        mine = {number: inner[at] for at, number in enumerate(sorted(self._whole)) if at in inner}
        on_host = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), mine)
        parts = gather_objects(self._model.ranks.groups, [on_host], self._model.device)
        states = {number: state for part in parts for number, state in part.items()}
        return {**packed, "state": {number: states[number] for number in sorted(states)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the states of this rank's parameters from a ``state_dict`` of any number of ranks
        or of one process; all ranks must call.

        Raises:
            ValueError: the groups have other numbers of parameters.
            RuntimeError: another rank failed.
        """
        with together(self._model.ranks.groups, self._model.device):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own_sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != own_sizes:
            raise ValueError(
                f"{self._name}: the state dict has parameter groups of {sizes} parameters, the "
                f"optimizer of {own_sizes}; build the groups as they were when it was saved"
            )
        saved = [key for group in groups for key in group["params"]]
        known = state_dict["state"]
        order = enumerate(sorted(self._whole))  # the inner optimizer's order
        states = {at: known[saved[number]] for at, number in order if saved[number] in known}
        packed = self.inner.state_dict()["param_groups"]
        for outer, inner, loaded in zip(self.param_groups, packed, groups, strict=True):
            outer.update(options_of(loaded))
            inner.update(options_of(loaded))
        self.inner.load_state_dict({"state": states, "param_groups": packed})

    def make_states(self) -> None:
        """Makes states as the first step does, for all parameters that have none yet."""
        for group in self.inner.param_groups:
            for whole in without_state(group["params"], self.inner.state):
                probe = nn.Parameter(torch.zeros_like(whole, memory_format=torch.contiguous_format))
                probe.grad = torch.zeros_like(probe)
                self.inner.state[whole] = stepped(self.inner, group, probe).state[probe]
