"""The kernel calls of an optimizer step, kept while the same parameters have gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerocore._C import HostUpdate, same_objects
from zerocore.common.alarm import waiting
from zerocore.optim.flat_states import State
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import Placed, local_of
from zerocore.tensor.rows import groups_of, local_part, shard_of

_HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HostUnit:
    """A unit with states on the host, where threads update it while Python continues."""

    state_ref: Callable[[], Any]
    unit: int


@dataclass(frozen=True)
class Factors:
    """A factor for a step's gradients, and a tensor that is not 0 to skip the step."""

    grad_scale: Tensor | None
    found_inf: Tensor | None

    @cached_property
    def on_host(self) -> Factors:
        """The factors on the host; all units there share one copy, so the host waits only once."""
        return Factors(_copied(self.grad_scale), _copied(self.found_inf))

    def skips(self, device: torch.device) -> Tensor:
        assert self.found_inf is not None
        return self.found_inf.to(device) != 0


@dataclass
class Batch:
    """Tensors that one call of the kernel updates: of one group and device, with the same dtypes.

    A batch on the host has tensors of one unit; the unit's last batch sends its weights.
    """

    group: dict[str, Any]
    device: torch.device
    host: HostUnit | None = None
    is_last: bool = False
    brings_grads: bool = False  # copies gradients, which are on the host, to the device
    positions: list[int] = field(default_factory=list)  # in the unit, for a batch on the host
    indices: list[int] = field(default_factory=list)  # among all parameters
    weights: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    model_weights: list[Tensor] = field(default_factory=list)
    # Casts in a pass of their own: other pairs than a half type and float32.
    other_casts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, index: int, param: Tensor, state: State, model_weight: Tensor | None) -> None:
        weight = _plain(param)
        self.indices.append(index)
        self.weights.append(weight)
        self.exp_avgs.append(_plain(state["exp_avg"]))
        self.exp_avg_sqs.append(_plain(state["exp_avg_sq"]))
        self.steps.append(state["step"])
        self.positions.append(getattr(param, "position", -1))
        if isinstance(param, ShardedParameter) and param.grad_device != self.device:
            self.brings_grads = True
        if model_weight is None:
            return
        if weight.dtype == torch.float32 and model_weight.dtype in _HALF_TYPES:
            self.model_weights.append(model_weight)
        else:
            self.other_casts.append((model_weight, weight.detach().view(model_weight.shape)))

    def run(self, grads: Sequence[Tensor], factors: Factors) -> None:
        """Takes one step; ``grads`` has the gradients of all parameters."""
        if self.host is not None:
            self._run_on_host(self.host, grads, factors.on_host)
            return
        lr, lr_tensor = self.group["lr"], None
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            lr, lr_tensor = 0.0, _scalar_on(self.device, lr)
        used = [grads[index] for index in self.indices]
        torch.ops.zerocore.adamw(
            self.weights,
            [grad.to(self.device) for grad in used] if self.brings_grads else used,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            self.model_weights,
            lr=float(lr),
            **self._options(),
            lr_tensor=lr_tensor,
            grad_scale=_scalar_on(self.device, factors.grad_scale),
            found_inf=_scalar_on(self.device, factors.found_inf),
        )
        for model_weight, weight in self.other_casts:
            model_weight.copy_(weight)

    def _options(self) -> dict[str, Any]:
        beta1, beta2 = self.group["betas"]
        names = ("eps", "weight_decay", "maximize")
        return {"beta1": beta1, "beta2": beta2, **{name: self.group[name] for name in names}}

    def _run_on_host(self, host: HostUnit, grads: Sequence[Tensor], factors: Factors) -> None:
        """Starts one step on the host, with its arguments as they are now, and returns."""
        update = HostUpdate(
            host.unit,
            self.positions,
            self.weights,
            [grads[index] for index in self.indices],
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            self.model_weights,
            self.other_casts,
            lr=float(self.group["lr"]),
            **self._options(),
            grad_scale=factors.grad_scale,
            found_inf=factors.found_inf,
        )
        engine = host.state_ref().engine
        engine.update_on_host(update)
        if self.is_last:
            engine.send_weights(host.unit)


def _plain(tensor: Any) -> Tensor:
    """Returns this rank's elements as a plain tensor: operators look up the class of a subclass."""
    part = local_part(tensor)
    return local_of(part) if isinstance(part, Placed) else part


# By groups and device: indices of gradients whose squares these groups sum (no groups: each rank
# has all). Groups without gradients are here, too: other ranks may have some, and would wait.
Squares = dict[tuple[Sequence[dist.ProcessGroup], torch.device], list[int]]
OnHost = dict[int, ShardedParameter]  # parameters with states on the host, by index


@dataclass
class UpdatePlan:
    """The kernel calls of a step, and the facts that they depend on."""

    kinds: list[torch.dtype | None]  # dtypes of all parameters' gradients
    states: dict[Any, State]  # the optimizer's states when the plan was made
    locals: list[Tensor]  # this rank's parts of all parameters
    batches: list[Batch]
    squares: Squares
    on_host: OnHost

    def uses(self, states: dict[Any, State], locals: Sequence[Tensor]) -> bool:
        """Whether the states and parts are still the same: a program may drop or replace some."""
        same_parts = len(locals) == len(self.locals) and all(map(is_, locals, self.locals))
        return same_parts and same_objects(states, self.states)


def make_plan(
    groups: Sequence[dict[str, Any]],
    grads: Sequence[Any],
    kinds: list[torch.dtype | None],
    states: Mapping[Any, State],
    updates_on_host: bool,
) -> UpdatePlan:
    """Makes the plan for all parameters' gradients, in order; None stands for a missing one.

    Without ``updates_on_host``, the step itself updates what is on the host.
    """
    batches: dict[Hashable, Batch] = {}
    places = [(param, group) for group in groups for param in group["params"]]
    squares = squares_of([param for param, _ in places], grads)
    on_host: OnHost = {}
    for index, ((param, group), grad) in enumerate(zip(places, grads, strict=True)):
        if grad is None:
            continue
        shard = shard_of(param)
        model_weight = getattr(param if shard is None else shard, "model_weight", None)
        model_dtype = None if model_weight is None else model_weight.dtype
        host = None
        if isinstance(param, ShardedParameter) and param.on_host:
            if updates_on_host:
                host = HostUnit(param.state_ref, param.unit)
                on_host[index] = param
            else:
                model_weight = None  # the engine casts and sends it
        key = (id(group), param.device, param.dtype, kinds[index], model_dtype, host)
        batch = batches.setdefault(key, Batch(group, param.device, host))
        batch.add(index, param, states[param], model_weight)
    kept = {param: dict(state) for param, state in states.items()}
    parts = [local_part(param) for param, _ in places]
    return UpdatePlan(kinds, kept, parts, _in_order(list(batches.values())), squares, on_host)


def _in_order(batches: list[Batch]) -> list[Batch]:
    """Sorts batches: those on the device first, then those on the host in order of the forward."""
    orders: dict[Any, list[int]] = {}
    for host in (batch.host for batch in batches):
        if host is not None and host.state_ref not in orders:
            orders[host.state_ref] = [event.unit for event in host.state_ref().engine.order]

    def place(batch: Batch) -> tuple[int, int, int]:
        if batch.host is None:
            return -1, 0, 0
        order, unit = orders[batch.host.state_ref], batch.host.unit
        called = order.index(unit) if unit in order else len(order)
        return list(orders).index(batch.host.state_ref), called, unit

    ordered = sorted(batches, key=place)
    for batch, following in zip(ordered, [*ordered[1:], None], strict=False):  # may be empty
        batch.is_last = following is None or following.host != batch.host
    return ordered


def squares_of(params: Sequence[Tensor], grads: Sequence[Any]) -> Squares:
    """Returns the gradients whose squares each sequence of groups sums, by index."""
    squares: Squares = {}
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        groups, device = groups_of(param), param.device
        if isinstance(param, ShardedParameter):
            device = param.grad_device
        indices = squares.setdefault((groups, device), [])
        if grad is not None:
            indices.append(index)
    return squares


def _known_squares(param: ShardedParameter | None) -> Tensor | None:
    if param is None:
        return None
    return param.state_ref().engine.known_squares(param.unit, param.position)


def _copied(number: Tensor | None) -> Tensor | None:
    """Copies a scalar to the host as float32: its owner may change it before the host reads it."""
    return None if number is None else number.to("cpu", torch.float32, copy=True)


def _scalar_on(device: torch.device, number: Any) -> Tensor | None:
    """Moves a scalar to the device as float32, without a wait; None stays None."""
    return None if number is None else number.to(device, torch.float32, non_blocking=True)


def global_norm(squares: Squares, grads: Sequence[Any], on_host: OnHost | None = None) -> Tensor:
    """Returns the 2-norm of all gradients, float64, with one all-reduce per process group.

    The engine may know the squares of gradients on the host already, chunk by chunk.
    """
    sums: list[Tensor] = []
    for (groups, device), indices in squares.items():
        square = torch.zeros(2, dtype=torch.float64, device=device)
        known = [_known_squares(on_host.get(index)) for index in indices] if on_host else []
        has_known = any(sums_of_grad is not None for sums_of_grad in known)
        used = [grads[index] for index in indices]
        torch.ops.zerocore.sum_of_squares(square, used, known=known if has_known else None)
        for group in groups:
            with waiting(group, "the norm of gradients"):
                dist.all_reduce(square[:1], group=group)
        sums.append(square[0])
    return torch.stack([square.to(sums[0].device) for square in sums]).sum().sqrt()
