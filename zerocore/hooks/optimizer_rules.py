"""Decides which optimizers may update shards, and whether their steps need the shards' rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from zerocore.common.agreement import together
from zerocore.common.eager import eager
from zerocore.common.patching import around
from zerocore.hooks.optimizer_states import fit_states, params_of, place_states, wrap_states
from zerocore.model.ranks import Ranks
from zerocore.tensor.earlier import live_optimizers
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.placed import shard_in

_EAGER = "_zerocore_eager"
# These update each element from that element alone, so their steps do not need the rules.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.AdamW,  # before Adam, whose step it inherits
    optim.Adam,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)


@around
def checks_shards(add: Any, self: Optimizer, param_group: dict[str, Any]) -> None:
    """Wraps ``Optimizer.add_param_group``: rejects shards that the optimizer cannot update."""
    add(self, param_group)
    try:
        prepare(self)
    except ValueError:
        self.param_groups.pop()
        raise


def prepare(optimizer: Optimizer) -> None:
    """Hooks the state dicts and steps of an optimizer that holds shards. Raises ValueError if it
    cannot update them."""
    sharded: Any = [shard for p in params_of(optimizer) if (shard := shard_in(p)) is not None]
    if not sharded:
        return
    _refuse(optimizer, sharded)
    # A wrapper may lack hooks; then the hooks of the optimizer inside it run.
    hooks = vars(optimizer).get("_optimizer_state_dict_post_hooks")
    if hooks is not None and wrap_states not in hooks.values():
        optimizer.register_state_dict_post_hook(wrap_states)
        optimizer.register_load_state_dict_pre_hook(_fit_states)
    cls: Any = type(optimizer)
    if not hasattr(cls.step, _EAGER):  # torch.compile cannot trace shards
        cls.step = eager(cls.step)
        setattr(cls.step, _EAGER, True)


def earlier_optimizers(params: Iterable[Tensor]) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Returns the optimizers of parameters that are about to be sharded, with their state dicts,
    in the same order on all ranks."""
    numbers = {id(param): number for number, param in enumerate(params)}
    keyed = []
    for optimizer in live_optimizers():
        positions = [numbers.get(id(param), -1) for param in params_of(optimizer)]
        if max(positions, default=-1) >= 0:
            keyed.append(((type(optimizer).__qualname__, positions), optimizer))
    return [(opt, opt.state_dict()) for _, opt in sorted(keyed, key=itemgetter(0))]


def take_over(earlier: Sequence[tuple[Optimizer, dict[str, Any]]], ranks: Ranks) -> None:
    """Shards the states from :func:`earlier_optimizers` as their parameters are; collective. An
    optimizer that cannot update shards raises in its next step."""
    with together(ranks.groups) as facts:
        facts += [f"a {type(opt).__name__} with states" for opt, saved in earlier if saved["state"]]
    for optimizer, state_dict in earlier:
        try:
            prepare(optimizer)
        except ValueError:
            continue
        if state_dict["state"]:
            optimizer.load_state_dict(state_dict)


def _refuse(optimizer: Optimizer, sharded: list[ShardedParameter]) -> None:
    if isinstance(optimizer, optim.SparseAdam):
        raise ValueError(
            f"SparseAdam cannot update '{sharded[0].fqn}', which is sharded: it takes sparse "
            "gradients, and a sharded model has dense ones. Use torch.optim.AdamW or another "
            "optimizer of dense gradients, or give it parameters that are not sharded"
        )


def without_rules(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an element-wise optimizer's step so that torch functions in it skip the shards' rules.

    The look-up of a rule in Python takes about a microsecond per function.
    """
    if hasattr(step, "hooked"):
        # Torch has wrapped this class's step to run its hooks, and the hooks need the rules.
        hooked: Any = Optimizer.profile_hook_step(without_rules(vars(step)["__wrapped__"]))
        hooked.hooked = True
        return hooked

    @wraps(step)
    def run(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if type(self) not in ELEMENTWISE:
            return step(self, closure)  # a subclass may not work element by element
        enabled = None if closure is None else _with_rules(closure)
        with torch._C.DisableTorchFunctionSubclass():
            result = step(self, enabled)
            place_states(self)
        return result

    return run


def _with_rules(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Enables the rules within a closure, which runs the model and may read parameters."""
    enable: Any = torch._C._EnableTorchFunction

    @wraps(closure)
    def run() -> Any:
        with enable():
            return closure()

    return run


def _fit_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    shards = (param for param in params_of(optimizer) if isinstance(param, ShardedParameter))
    with ExitStack() as stack:
        for state in filter(None, {param.state_ref(): None for param in shards}):
            stack.enter_context(together(state.ranks.groups, state.device))
        fitted = fit_states(optimizer, state_dict)
    return fitted
