"""Muon for sharded models: matrices are updated by their owners, other parameters by AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from zerocore.common.agreement import together
from zerocore.hooks.optimizer_states import as_state, options_of, params_of, without_state
from zerocore.hooks.optimizer_steps import ShardOptimizer
from zerocore.matrices.exchange import Choice, Lanes, RoundExchange, choice_of
from zerocore.matrices.muon_rounds import WIRE, MuonRounds, check_options
from zerocore.matrices.ownership import plan_rounds
from zerocore.matrices.parameters import (
    Item,
    Used,
    Whole,
    check_has_whole_matrices,
    check_pattern,
    check_sharded,
    checked_splits,
    full_shape,
    groups_of,
    is_matrix,
    items_of,
    matrices_of,
    name_of,
    param_of,
    plan_of,
    used_in_step,
)
from zerocore.model.state import ShardState
from zerocore.optim.adamw import AdamW
from zerocore.optim.kernel_calls import Factors, global_norm, squares_of
from zerocore.tensor.rows import local_part, own_elements


class Muon(ShardOptimizer):
    """Muon for the matrices of a sharded model, and the fused AdamW for its other parameters.

    The model comes from :func:`zerocore.shard` or ``zerocore.fsdp.fully_shard``.

    Parameters whose full shape has two or three dimensions are matrices or stacks of them; the
    last two dimensions are a matrix. Momentum stays sharded. In a step each matrix's update goes to
    its owner in bfloat16, in which Newton-Schulz works, is orthogonalised there and returns. The
    results equal those of ``torch.optim.Muon`` in one process. Embeddings and output layers are
    matrices by shape: to train them with AdamW, name them in ``adamw_names``. All ranks must build
    the optimizer and call ``step()`` together.

    Args:
        params: parameters of one sharded model, ``(name, parameter)`` pairs, or dicts of groups.
            A group's options are for its matrices, and ``"adamw": {...}`` in it for its other
            parameters. ``"use_muon": False`` gives the whole group and its options to AdamW.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            ``torch.optim.Muon``.
        adamw: options of :class:`zerocore.optim.AdamW`, such as ``{"lr": 3e-4}``.
        adamw_names: patterns (``"*embed*"``) of names of matrices that AdamW trains.
        split: by a pattern of names, into how many matrices a parameter's rows are cut, such as
            ``{"*.qkv.weight": 3}``; each is orthogonalised by itself.
        clip_grad_norm: as in :class:`zerocore.optim.AdamW`, over all groups.

    Raises:
        ValueError: in a step, on every rank, if a matrix has a gradient on some ranks only.
        ValueError: no parameter is a matrix, ranks have parts of one matrix as parameters, the
            parameters do not belong to one sharded model, a split does not divide, or an option
            is out of range. The message names the parameter.
        RuntimeError: another rank failed, or got other parameters or options.
    """

    moves_matrices = True
    clip_grad_norm: float | None = None
    grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        adamw_names: Sequence[str] = (),
        split: Mapping[str, int] | None = None,
        clip_grad_norm: float | None = None,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        options |= {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        options |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive or None, got {clip_grad_norm}")
        self.clip_grad_norm = clip_grad_norm
        groups = groups_of(params)
        self._model: ShardState = check_sharded(groups, "Muon")
        # With offload, the engine sends the weights from the host to the device.
        self.casts_model_weights = self._model.config.offload is None
        self._adamw_options, self._adamw_names = dict(adamw or {}), tuple(adamw_names)
        with together(self._model.ranks.groups, self._model.device) as facts:
            self._splits = checked_splits(split)
            super().__init__(groups, options)
            self._check_choice()
            facts += [
                f"{'Muon' if group['use_muon'] else 'AdamW'} for '{name_of(param)}'"
                for group in self.param_groups
                for param in group["params"]
            ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as ``torch.optim.Optimizer.add_param_group`` does, split into one for Muon
        and one for AdamW unless that is empty. All ranks must call."""
        group = {**param_group, "params": items_of(param_group["params"])}
        check_sharded([group], "Muon", self._model)
        adamw = {**self._adamw_options, **group.pop("adamw", {})}
        wanted = group.pop("use_muon", None)
        items = group.pop("params")
        matrices = [item for item in items if self._is_for_muon(item, wanted)]
        chosen = {id(item) for item in matrices}
        rest = [item for item in items if id(item) not in chosen]
        before = len(self.param_groups)
        try:
            if matrices:
                self._add({**self.defaults, **group}, matrices, True)
                check_options(self.param_groups[-1])
                for param in self.param_groups[-1]["params"]:
                    matrices_of(0, Whole.of(param).place, 0, self._splits)  # raises ValueError
            if rest:
                self._add({**adamw, **(group if wanted is False else {})}, rest, False)
            self._adopt_groups()
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise

    def _is_for_muon(self, item: Item, wanted: bool | None) -> bool:
        param = param_of(item)
        if wanted and not is_matrix(param):
            raise ValueError(
                f"use_muon: parameter '{name_of(param)}' of shape {tuple(full_shape(param))} is "
                "neither a matrix nor a stack of matrices; leave it to AdamW"
            )
        named = any(fnmatchcase(name_of(param), pattern) for pattern in self._adamw_names)
        chosen = (is_matrix(param) and not named) if wanted is None else wanted
        if chosen:
            check_has_whole_matrices(param)
        return chosen

    def _add(self, options: dict[str, Any], items: list[Item], use_muon: bool) -> None:
        """Adds a group with the given options; Muon's defaults do not fill an AdamW group."""
        if not use_muon:
            filled = AdamW(list(items), **options)  # checks options and adds defaults
            options = options_of(filled.param_groups[0])
        kept, self.defaults = self.defaults, {}
        try:
            super().add_param_group({**options, "params": items, "use_muon": use_muon})
        finally:
            self.defaults = kept

    def _adopt_groups(self) -> None:
        """Gives AdamW its groups and the shared states; drops plans, which depend on groups."""
        rest = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw: AdamW | None = None
        if rest:
            self._adamw = AdamW([param for group in rest for param in group["params"]])
            self._adamw.param_groups = rest
            self._adamw.updates_on_host = False  # the step updates a unit's matrices at once, too
            self._adamw.state = self.state
        self._plans: dict[Used, MuonRounds] = {}

    def _muon_params(self) -> list[tuple[Any, dict[str, Any]]]:
        return [
            (param, group)
            for group in self.param_groups
            if group["use_muon"]
            for param in group["params"]
        ]

    def _check_choice(self) -> None:
        params = params_of(self)
        matrices = [param for param, _ in self._muon_params()]
        if not matrices:
            shapes = {name_of(param): tuple(full_shape(param)) for param in params[:8]}
            raise ValueError(
                f"Muon found no matrix among {len(params)} parameters ({shapes}); use "
                "zerocore.optim.AdamW for them"
            )
        for pattern in self._splits:
            check_pattern("split", pattern, matrices)
        for pattern in self._adamw_names:
            check_pattern("adamw_names", pattern, [param for param in params if is_matrix(param)])

    def describe(self) -> Choice:
        """Returns the parameters of Muon and AdamW, the matrices' owners and the bytes of a step.

        In that step every trainable parameter has a gradient. ``str()`` is a table. Of experts, it
        lists only those of this rank's mesh.
        """
        pairs = self._muon_params()
        plan = self._plan_for(tuple(param.requires_grad for param, _ in pairs))
        rest = [group for group in self.param_groups if not group["use_muon"]]
        return choice_of(
            "Muon",
            plan.rounds,
            [name_of(param) for param, _ in pairs],
            [name_of(param) for group in rest for param in group["params"]],
            self._model.ranks,
        )

    def _plan_for(self, used: Used) -> MuonRounds:
        return plan_of(used, self._plans, lambda: self._make_plan(used))

    def _make_plan(self, used: Used) -> MuonRounds:
        pairs = [(Whole.of(param), group) for param, group in self._muon_params()]
        rounds: list[RoundExchange] = []
        like = torch.empty(0, dtype=WIRE, device=self._model.device)
        for mesh in range(len(self._model.meshes)):  # the same order on all ranks
            indices = [i for i, (whole, _) in enumerate(pairs) if used[i] and whole.mesh == mesh]
            matrices = [
                matrix
                for i in indices
                for matrix in matrices_of(
                    i, pairs[i][0].place, pairs[i][1]["ns_steps"], self._splits
                )
            ]
            lanes = Lanes.of(self._model, mesh)
            cuts = {index: lanes.cut(pairs[index][0].shard) for index in indices}
            steps = plan_rounds(matrices, cuts, lanes.grid, lanes.rank, WIRE.itemsize)
            rounds += [RoundExchange(step, lanes, like) for step in steps]
        return MuonRounds(rounds, pairs)

    def _update(self) -> None:
        # Skips the dispatch of the gradients' subclass, which only costs time here.
        with torch._C.DisableTorchFunctionSubclass():
            self._follow_model()
            factors = self._clip_factors()
            params = [param for param, _ in self._muon_params()]
            plan = self._plan_for(used_in_step(self._model, "Muon", params))
            self._make_momenta(p for p in params if p.grad is not None and not self.state.get(p))
            plan.run(self.state, factors, lambda: self._update_rest(factors))

    def _follow_model(self) -> None:
        """Takes the model's new state if ``zerocore.fsdp`` has made its engine again."""
        if (state := check_sharded(self.param_groups, "Muon")) is not self._model:
            self._model, self._plans = state, {}

    def _update_rest(self, factors: Factors | None) -> None:
        if self._adamw is not None:
            self._adamw.update(factors)

    def _clip_factors(self) -> Factors | None:
        """Returns the float64 factor that clips gradients, and whether to skip the step because the
        norm is not finite; None without clipping. The host does not read the norm."""
        self.grad_norm = None
        if self.clip_grad_norm is None:
            return None
        params = params_of(self)
        grads: list[Any] = [local_part(param.grad) for param in params]
        norm = global_norm(squares_of(params, grads), grads)
        self.grad_norm = norm.float()
        coefficient = (self.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return Factors(coefficient, norm.isfinite().logical_not().float())

    def _make_momenta(self, params: Iterable[Any]) -> None:
        for param in params:
            zeros = torch.zeros_like(own_elements(param))
            self.state[param] = {"momentum_buffer": as_state(zeros, param)}

    def make_states(self) -> None:
        """Makes states as the first step does, for all parameters that have none yet."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            params = [param for param, _ in self._muon_params()]
            self._make_momenta(without_state(params, self.state))
        if self._adamw is not None:
            self._adamw.make_states()

    def __setstate__(self, state: dict[str, Any]) -> None:
        held: Mapping[Any, Any] = self.__dict__.get("state", {})
        groups, loaded = state["param_groups"], state["state"]
        matrices = {param for g in groups if g["use_muon"] for param in g["params"]}
        rest = AdamW([param for g in groups for param in g["params"]])
        rest.state.update({param: held[param] for param in held if param not in matrices})
        rest.__setstate__(
            {
                "state": {p: s for p, s in loaded.items() if p not in matrices},
                "param_groups": [group for group in groups if not group["use_muon"]],
            }
        )
        loaded.update(rest.state)
        super().__setstate__(state)
        self._adopt_groups()
