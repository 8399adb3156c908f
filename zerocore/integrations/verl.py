"""Engines for verl's trainers with sharded models, which export weights in buckets.

Import it where verl's workers start: it registers the engines as ``backend="zerocore"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerocore.api import shard
from zerocore.checkpoint.checkpoints import Checkpoints
from zerocore.model.as_ddp import no_sync
from zerocore.optim.clipping import clip_grad_norm_
from zerocore.options.precision import MixedPrecision
from zerocore.weights.buckets import export
from zerocore.weights.parked import parked

try:
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import (
        FSDPEngineWithLMHead,
        FSDPEngineWithValueHead,
    )
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "zerocore.integrations.verl: verl is not installed; pip install verl", name="verl"
    ) from None

BACKEND = "zerocore"


class ShardedEngineMixin:
    """A base class to put before verl's engine for FSDP, whose configuration it uses.

    ``fsdp_size`` is the number of ranks that share the state; more ranks are replicas.
    ``reshard_after_forward`` selects stage 3, else stage 2. ``param_offload`` parks model and
    optimizer between the engine's contexts.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    _parking: ExitStack | None = None

    def initialize(self: Any) -> None:
        """Makes model, optimizer and schedule, and parks them under ``param_offload``."""
        self._build_model_optimizer()
        if self.is_param_offload_enabled:
            self.to("cpu")

    def _build_fsdp_module(self: Any, module: nn.Module) -> nn.Module:
        policy = self.engine_config.mixed_precision or {}
        param = _dtype(policy.get("param_dtype", "bf16"))
        if param == torch.float16:
            raise ValueError("mixed_precision: fp16 needs a scaler; use bf16 for zerocore's engine")
        self._autocast_dtype = param
        reduce = _dtype(policy.get("reduce_dtype", "fp32"))
        mesh = self.device_mesh
        return shard(
            module,
            stage=3 if self.engine_config.reshard_after_forward else 2,
            group=mesh,
            mixed_precision=MixedPrecision(param, reduce),
            device=torch.device(mesh.device_type) if mesh.device_type == "cpu" else None,
        )

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        if is_last_micro_batch:
            yield
        else:
            with no_sync(self.module):
                yield

    def optimizer_step(self: Any) -> float:
        """Clips gradients and steps, unless their norm is not finite; returns the norm."""
        assert self.optimizer is not None
        norm = float(clip_grad_norm_(self.module, self.optimizer_config.clip_grad))
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return norm

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Parks model and optimizer (``"cpu"``), or restores both; parks no optimizer alone."""
        if device != "cpu" and self._parking is not None:
            self._parking.close()
            self._parking = None
        elif device == "cpu" and model and self._parking is None:
            stack = ExitStack()
            optimizers = [] if self.optimizer is None else [self.optimizer]
            stack.enter_context(parked(self.module, *optimizers))
            self._parking = stack

    def get_per_tensor_param(
        self: Any, layered_summon: bool = False, base_sync_done: bool = False, **options: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], Any]:
        """Returns names and full tensors, also of a parked model. Adapters are merged under
        ``lora.merge``; otherwise only adapters are returned once the base is synchronised."""
        config = getattr(self.module, "peft_config", {}).get("default")
        if config is None:
            return export(self.module).tensors(), None
        if self.model_config.lora.get("merge", False):
            return export(self.module, merge="lora").tensors(), None
        names = _adapters if base_sync_done else None
        return export(self.module, names=names).tensors(), config

    def get_per_tensor_param_shard(self, *args: Any, **options: Any) -> Any:
        """Rejects verl's own gather, which would take a shard for the full tensor.

        Raises:
            NotImplementedError: always.
        """
        raise _not_whole("get_per_tensor_param_shard")

    def get_per_tensor_param_delta_shard(self, *args: Any, **options: Any) -> Any:
        """Rejects the call, as :meth:`get_per_tensor_param_shard`."""
        raise _not_whole("get_per_tensor_param_delta_shard")

    def save_checkpoint(
        self, local_path: str, hdfs_path: Any = None, global_step: int = 0, **options: Any
    ) -> None:
        """Saves model and optimizer; any number of ranks can load them. All ranks must call."""
        keep = options.get("max_ckpt_to_keep")
        checkpoints = Checkpoints(local_path, self.module, self.optimizer, keep=keep)
        checkpoints.save(global_step).wait()

    def load_checkpoint(self, local_path: str, hdfs_path: Any = None, **options: Any) -> None:
        """Loads the newest checkpoint; all ranks must call."""
        Checkpoints(local_path, self.module, self.optimizer).load()


def _not_whole(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is not supported: in zerocore's engine parameters are ranges of elements; call "
        "engine.get_per_tensor_param(), which returns full tensors"
    )


def _adapters(name: str) -> str | None:
    return name.replace(".default.", ".") if "lora_" in name else None


def _dtype(name: Any) -> torch.dtype:
    from verl.utils.torch_dtypes import PrecisionType

    dtype: torch.dtype = PrecisionType.to_dtype(name)
    return dtype


@EngineRegistry.register("language_model", BACKEND, device=["cuda", "npu", "cpu"])
class ShardedEngineWithLMHead(ShardedEngineMixin, FSDPEngineWithLMHead):
    """verl's engine for a sharded language model."""


@EngineRegistry.register("value_model", BACKEND, device=["cuda", "npu", "cpu"])
class ShardedEngineWithValueHead(ShardedEngineMixin, FSDPEngineWithValueHead):
    """verl's engine for a sharded value model."""
