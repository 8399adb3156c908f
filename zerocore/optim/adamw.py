"""AdamW in one pass over moments, main weights and the weights that layers compute with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerocore._C import same_objects
from zerocore.common import late
from zerocore.hooks.optimizer_states import fitted, params_of, without_state
from zerocore.hooks.optimizer_steps import ShardOptimizer
from zerocore.optim.flat_states import State, adopt_states, allocate_states, check_loaded
from zerocore.optim.kernel_calls import Factors, UpdatePlan, global_norm, make_plan
from zerocore.tensor import pending_host_updates
from zerocore.tensor.parameter import ShardedParameter
from zerocore.tensor.rows import local_part, shard_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# torch.optim.AdamW has these options, too: a state dict of one class loads into the other.
_TORCH_OPTIONS = {
    "amsgrad": False,
    "foreach": None,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}


class AdamW(ShardOptimizer):
    """AdamW as one kernel call for all tensors of a group: shards, DTensors, plain parameters.

    In float32 on a CPU, a step computes the bits of ``torch.optim.AdamW(fused=True)``. Only the
    last ``numel % 16`` elements of a tensor may differ, in the last bit. A parameter's moments
    (``state[p]["exp_avg"]`` and ``["exp_avg_sq"]``) are views of one flat tensor per unit and
    dtype, and its ``step`` is a float32 scalar on its device. Nothing waits for the device, and a
    step of plain parameters can be captured in a CUDA graph. State dicts are interchangeable with
    ``torch.optim.AdamW`` over the same parameters. If a program sets ``state[p]``, the next step
    copies its values into those views; for a sharded parameter these may be shards, or full values.

    Gradients may have another dtype than their parameter (bfloat16 or float16 with float32). If a
    parameter has an attribute ``model_weight`` (1-D, of its numel, of another dtype), the step
    writes its new value there, too; for bfloat16 and float16 with float32, in the same pass.

    Under ``torch.amp.GradScaler`` the same pass unscales gradients: ``p.grad`` keeps the scaled
    values.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or dicts of groups.
        lr: learning rate, a float or a tensor of one element.
        betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``.
        amsgrad: not supported; only False.
        foreach, fused, capturable: as in torch; every instance is fused and can be captured, so
            they change nothing.
        clip_grad_norm: the bound of the gradients' global 2-norm over all groups and ranks. The
            same pass scales by ``min(1, clip / (norm + 1e-6))``, as
            ``torch.nn.utils.clip_grad_norm_``; ``p.grad`` does not change. May be set later.
            ``grad_norm`` then has the norm before clipping. If it is NaN or infinite, the step
            changes nothing, and no tensor's ``step`` counts it.

    Raises:
        OutOfMemory: a step of shards runs out of memory; the first step makes the states.
        ValueError: an option is out of range, or a parameter is not dense in memory.
        TypeError: a parameter is not float32, bfloat16, float16 or float64.
    """

    _step_supports_amp_scaling = True
    casts_model_weights = True
    updates_on_host = True
    clip_grad_norm: float | None = None
    grad_norm: Tensor | None = None
    _plan: UpdatePlan | None = None
    _has_rows = False  # parameters are DTensors

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        clip_grad_norm: float | None = None,
    ) -> None:
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive or None, got {clip_grad_norm}")
        self.clip_grad_norm = clip_grad_norm
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        modes = {"amsgrad": amsgrad, "maximize": maximize, "capturable": capturable}
        super().__init__(params, {**_TORCH_OPTIONS, **options, **modes})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as in ``torch.optim.Optimizer``, and checks its options and parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for param in group["params"]:
                if param.requires_grad:
                    _check_param(param, self._label(param))
                self._has_rows = self._has_rows or local_part(param) is not param
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        group["betas"] = tuple(float(beta) for beta in group["betas"])
        self._plan = None

    def _update(self) -> None:
        """Updates all parameters; explains an out-of-memory error (the first step makes states)."""
        try:
            # Gradients of shards are a subclass; this skips Python's look-up of their rules.
            with torch._C.DisableTorchFunctionSubclass():
                self.update(None)
        except (RuntimeError, MemoryError) as error:
            explained = late.call("explain_step", error, params_of(self))
            if explained is None:
                raise
            raise explained from error

    def update(self, factors: Factors | None) -> None:
        """Takes one step; None computes the factors from clipping and a GradScaler."""
        params = params_of(self)
        grads: list[Any] = [param.grad for param in params]
        parts = params
        if self._has_rows:
            parts, grads = list(map(local_part, params)), list(map(local_part, grads))
        kinds = [None if grad is None else grad.dtype for grad in grads]
        plan = self._plan
        if plan is None or plan.kinds != kinds or not plan.uses(self.state, parts):
            plan = self._plan = self._make_plan(params, grads, kinds)
        factors = factors or self._factors(plan, grads)
        for batch in plan.batches:
            batch.run(grads, factors)
            if batch.host is not None:
                pending_host_updates.begin(batch.host.state_ref)

    def synchronize(self) -> None:
        """Waits until a step on the host is done, which may continue after :meth:`step` returns.

        Forwards, state dicts, torch functions of parameters and states, and the next step wait by
        themselves. Call it before code outside torch reads the memory of ``state``.

        Raises:
            RuntimeError: the step has failed.
        """
        pending_host_updates.finish()

    def _make_plan(
        self, params: list[Tensor], grads: list[Any], kinds: list[torch.dtype | None]
    ) -> UpdatePlan:
        held = {} if self._plan is None else self._plan.states
        self._plan = None  # frees the memory of states that were dropped
        self._adopt_replaced(params, held)
        del held
        used = [param for param, kind in zip(params, kinds, strict=True) if kind is not None]
        new = [param for param in used if not self.state.get(param)]
        self.state.update(zip(new, allocate_states(new), strict=True))
        return make_plan(self.param_groups, grads, kinds, self.state, self.updates_on_host)

    def _adopt_replaced(self, params: list[Tensor], held: Mapping[Any, State]) -> None:
        """Copies values that the program has set in ``state`` into the ``held`` states."""
        changed = {
            param: self.state[param]
            for param in params
            if self.state.get(param) and not same_objects(self.state[param], held.get(param, {}))
        }
        for param, state in changed.items():
            if isinstance(param, ShardedParameter):
                state.update({key: fitted(param, key, value) for key, value in state.items()})
        check_loaded(changed, params, self._label)
        replaced = [param for param in changed if param in held]
        for param, state in adopt_states(changed, replaced, held).items():
            self.state[param].update(state)

    def _factors(self, plan: UpdatePlan, grads: list[Any]) -> Factors:
        """Returns the factors that undo a GradScaler's scale and clip; skips a non-finite norm."""
        scaled_by: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        factor = None if scaled_by is None else scaled_by.double().reciprocal()
        if self.clip_grad_norm is None or not plan.squares:
            return Factors(factor, found_inf)
        norm = global_norm(plan.squares, grads, plan.on_host)
        if factor is not None:
            norm = norm * factor.to(norm.device, non_blocking=True)
        self.grad_norm = norm.float()
        coefficient = (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = coefficient if factor is None else coefficient * factor.to(norm.device)
        is_bad = norm.isfinite().logical_not().float()
        return Factors(factor, is_bad if found_inf is None else is_bad + found_inf.to(norm.device))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict; waits for a step on the host first."""
        self.synchronize()
        return super().state_dict()

    def make_states(self) -> None:
        """Makes the missing states, as the first step would."""
        new = without_state(params_of(self), self.state)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.state.update(zip(new, allocate_states(new), strict=True))
        self._plan = None

    def _label(self, param: Tensor) -> str:
        if (shard := shard_of(param)) is not None:
            return f"parameter '{shard.fqn}'"
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param and "param_names" in group:
                    return f"parameter '{group['param_names'][index]}'"
                if other is param:
                    return f"parameter {index} of group {number}"
        return "a parameter"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "clip_grad_norm": self.clip_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pending_host_updates.finish()
        groups, loaded = state["param_groups"], state["state"]
        params = [param for group in groups for param in group["params"]]
        for group in groups:
            _check_options({**self.__dict__.get("defaults", {}), **group})
        held: Mapping[Any, Any] = self.__dict__.get("state", {})
        # Loaded states have the shapes of this rank's parts.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            check_loaded(loaded, params, self._label)
            loaded.update(adopt_states(loaded, params, held))
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(_TORCH_OPTIONS)
        self._has_rows = any(local_part(param) is not param for param in params)
        self._plan = None


def _check_options(group: Mapping[str, Any]) -> None:
    if group["amsgrad"]:
        raise ValueError("zerocore.optim.AdamW does not support amsgrad; use torch.optim.AdamW")
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"a tensor lr must have one element, got shape {tuple(lr.shape)}")
    elif not lr >= 0:
        raise ValueError(f"lr must be 0 or more, got {lr}")
    for index, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{index}] must be in [0, 1), got {beta}")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be 0 or more, got {group[name]}")


def _check_param(param: Tensor, label: str) -> None:
    param = local_part(param)
    if is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"{label} is a {type(param).__name__}, expected a plain tensor, a shard of "
            "zerocore.shard or a DTensor; use torch.optim.AdamW for it"
        )
    if param.dtype not in _DTYPES:
        raise TypeError(
            f"{label} is {param.dtype}, expected float32, bfloat16, float16 or float64; use "
            "torch.optim.AdamW for it"
        )
    if not torch.ops.aten.is_non_overlapping_and_dense(param):
        raise ValueError(
            f"{label} has gaps in its memory (shape {tuple(param.shape)}, strides "
            f"{param.stride()}); make it contiguous"
        )
