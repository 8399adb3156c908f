"""Hugging Face's ``Trainer`` for sharded models, without DDP and with sharded checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn

from zerocore.api import shard
from zerocore.common.extras import missing
from zerocore.integrations.accelerate import Accelerator
from zerocore.integrations.common import ShardFolders, check_precision, mixed_precision
from zerocore.model.state import find_state
from zerocore.options.config import Communication
from zerocore.reporting.metrics import metrics
from zerocore.state_dict import full_state_dict

try:
    import transformers
    from transformers.trainer import SCHEDULER_NAME
except ModuleNotFoundError:
    raise missing("transformers", "hf", "zerocore.integrations.transformers") from None

_REFUSED = {
    "fp16": "use bf16=True",
    "fp16_full_eval": "leave it out: evaluation uses the dtype of mixed_precision=",
    "bf16_full_eval": "leave it out: evaluation uses the dtype of mixed_precision=",
    "deepspeed": "leave it out: zerocore shards the model",
    "fsdp": "leave it out: zerocore shards the model",
    "torch_compile": "compile the model's blocks, block.compile()",
    "auto_find_batch_size": "choose the batch size",
}


class ShardedTrainerMixin:
    """A base class to put before ``transformers.Trainer``, or a subclass of it.

    Args:
        shard: options of :func:`zerocore.shard`, such as ``{"stage": 2}``. The trainer shards its
            model unless it is sharded already; ``bf16=True`` becomes ``mixed_precision``.
        log_metrics: adds :func:`zerocore.metrics` to logs with a training loss, and so to all
            loggers of ``report_to``.

    Checkpoints have the model in Hugging Face's format, and a folder ``zerocore`` with shards of
    weights and optimizer states. Any number of ranks can resume from these.

    Raises:
        ValueError: an argument does not work with a sharded model; the message names it.
    """

    def __init__(
        self,
        *args: Any,
        shard: Mapping[str, Any] | None = None,
        log_metrics: bool = False,
        **kwargs: Any,
    ) -> None:
        self._shard_options = dict(shard or {})
        self._log_metrics = log_metrics
        super().__init__(*args, **kwargs)

    def log(self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Logs as the trainer does, with the last step's figures under ``log_metrics``."""
        if self._log_metrics and "loss" in logs:
            logs = {**logs, **metrics(self.model)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Makes the accelerator, which must not wrap sharded models, then shards the model."""
        for name, advice in _REFUSED.items():
            if getattr(self.args, name, None):
                raise ValueError(f"{name} cannot be used with a sharded model; {advice}")
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # The trainer does not let us choose the class; ours has no fields of its own.
        self.accelerator.__class__ = Accelerator
        if self.model is not None:
            self._shard(self.model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Calls ``model_init`` and shards its model."""
        model: nn.Module = super().call_model_init(trial)  # type: ignore[misc]
        self._shard(model)
        return model

    def _shard(self: Any, model: nn.Module) -> None:
        state = find_state(model)
        if state is not None:
            if self._shard_options:
                raise ValueError(f"the model is sharded already; leave out {self._shard_options}")
            check_precision(state, self.args.mixed_precision, "Trainer")
        else:
            options: dict[str, Any] = {
                "mixed_precision": mixed_precision(self.args.mixed_precision),
                **self._shard_options,
            }
            if self.args.ddp_broadcast_buffers is False:
                communication = options.get("communication") or Communication()
                options["communication"] = replace(communication, sync_buffers=False)
            device = self.args.device  # makes the process group
            if any(param.is_meta for param in model.parameters()):
                options.setdefault("device", device)
            else:
                model.to(device)
            shard(model, **options)
        _sync_generate(model)

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Writes the model in Hugging Face's format; all ranks must call."""
        if state_dict is None:
            state_dict = full_state_dict(self.model, rank0_only=not self.args.save_on_each_node)
        if self.args.should_save:
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _shards(self: Any) -> ShardFolders:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        known = self.__dict__.get("_shard_folders")
        if known is None or known[0] is not optimizer:  # a second train() makes a new one
            known = (optimizer, ShardFolders(self.model, optimizer))
            self.__dict__["_shard_folders"] = known
        return known[1]

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        self._shards().save(output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Shards are loaded with the optimizer, which does not exist yet.
        if not ShardFolders.exist(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not ShardFolders.exist(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._shards().load(checkpoint)
        path = os.path.join(checkpoint, SCHEDULER_NAME)
        self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))


class Trainer(ShardedTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` for a sharded model, see :class:`ShardedTrainerMixin`."""


class Seq2SeqTrainer(ShardedTrainerMixin, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` for a sharded model, see :class:`ShardedTrainerMixin`."""


def _sync_generate(model: nn.Module) -> None:
    """Makes ``generate`` run on each rank until all ranks' texts have ended, as each token gathers
    the layers. Hugging Face sets ``synced_gpus`` only for wrappers that it knows."""
    state = find_state(model)
    generate = getattr(model, "generate", None)
    if (
        state is None
        or generate is None
        or state.world_size == 1
        or not state.config.placements.parameters
    ):
        return

    @wraps(generate)
    def in_step(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{**kwargs, "synced_gpus": True})

    model.__dict__["generate"] = in_step
