"""Lightning's strategies for sharded models: for ``Trainer`` and for ``Fabric``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partialmethod
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zerocore.api import shard
from zerocore.common.extras import missing
from zerocore.integrations.common import mixed_precision
from zerocore.model.as_ddp import no_sync
from zerocore.model.state import find_state
from zerocore.state_dict import full_optimizer_state_dict, full_state_dict

try:
    from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
    from lightning.fabric.plugins import Precision as FabricPrecision
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError:
    raise missing("lightning", "lightning", "zerocore.integrations.lightning") from None


class _Sharding:
    """The part of both strategies: the options of ``shard``, and precision as one of them."""

    _PLACES = ("accelerator", "parallel_devices", "cluster_environment", "process_group_backend")

    def __init__(self, **options: Any) -> None:
        places = {name: options.pop(name) for name in self._PLACES if name in options}
        self._shard_options = options
        super().__init__(**places)

    def _shard(self, model: nn.Module) -> nn.Module:
        return model if find_state(model) is not None else shard(model, **self._shard_options)

    def _take_precision(self, plugin: Any, kinds: tuple[type, ...], plain: Any) -> Any:
        if not isinstance(plugin, kinds):
            return plugin
        name: str = getattr(plugin, "precision", "")
        if name != "bf16-mixed":
            raise ValueError(f"precision {name!r} cannot be used with a sharded model; bf16-mixed")
        self._shard_options.setdefault("mixed_precision", mixed_precision("bf16"))
        return plain


class ShardedStrategy(_Sharding, DDPStrategy):
    """``lightning.pytorch.Trainer(strategy=ShardedStrategy(stage=3))``: no DDP around the module.

    The LightningModule is sharded before ``configure_optimizers``. ``precision="bf16-mixed"``
    becomes ``mixed_precision``. A checkpoint is one complete file, as DDP's: weights and states of
    optimizers are gathered to the CPU of rank 0, and loaded at any stage, on any number of ranks.

    Args:
        options: of :func:`zerocore.shard`; those that Lightning's DDPStrategy knows by the names
            of ``_PLACES`` go there.

    Raises:
        ValueError: another mixed precision than ``"bf16-mixed"``.
    """

    model: Any

    @property
    def precision_plugin(self) -> Any:
        """The plugin for other dtypes than the module's; none for mixed precision."""
        return DDPStrategy.precision_plugin.fget(self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        plain = self._take_precision(plugin, (MixedPrecision,), Precision())
        DDPStrategy.precision_plugin.fset(self, plain)

    def setup(self, trainer: Any) -> None:
        """Shards where the module is to be fitted; one that is sharded stays so."""
        if trainer.state.fn == TrainerFn.FITTING or find_state(self.model) is None:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self.setup_precision_plugin()  # nothing is broadcast: ranks hold different elements

    def configure_ddp(self) -> None:
        """Shards the module, where DDPStrategy would wrap it."""
        self.model = self._shard(self.model)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates, as :func:`zerocore.no_sync`."""
        with no_sync(self.model):
            yield

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        short = {"training_step": "train_step", "validation_step": "val_step"}.get(name, name)
        # Through the module's call, in which its layers are gathered ahead.
        with getattr(self.precision_plugin, f"{short}_context")():
            if find_state(self.model) is None:
                return getattr(self.lightning_module, name)(*args, **kwargs)
            return self._forward_redirection(
                self.model, self.lightning_module, name, *args, **kwargs
            )

    training_step = partialmethod(_run_step, "training_step")
    validation_step = partialmethod(_run_step, "validation_step")
    test_step = partialmethod(_run_step, "test_step")
    predict_step = partialmethod(_run_step, "predict_step")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full values on rank 0, ``{}`` elsewhere; all ranks call."""
        if find_state(self.lightning_module) is None:
            return dict(self.lightning_module.state_dict())
        return full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full states on rank 0, ``{}`` elsewhere; all ranks call."""
        return full_optimizer_state_dict(getattr(optimizer, "_optimizer", optimizer))


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()


class ShardedFabricStrategy(_Sharding, FabricDDPStrategy):
    """``lightning.Fabric(strategy=ShardedFabricStrategy(stage=3))``: no DDP around models.

    ``model, optimizer = fabric.setup(model, optimizer)`` shards, as ``fabric.setup_module(model)``
    does. Precision and checkpoints are as of :class:`ShardedStrategy`.

    Raises:
        ValueError: another mixed precision than ``"bf16-mixed"``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _NoSync()

    @property
    def precision(self) -> Any:
        """The plugin for other dtypes than the model's; none for mixed precision."""
        return FabricDDPStrategy.precision.fget(self)

    @precision.setter
    def precision(self, plugin: Any) -> None:
        plain = self._take_precision(plugin, (FabricMixedPrecision,), FabricPrecision())
        FabricDDPStrategy.precision.fset(self, plain)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shards ``module`` in place, unless it is sharded."""
        return self._shard(module)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Full values on rank 0, ``{}`` elsewhere; all ranks call."""
        return full_state_dict(module) if find_state(module) is not None else module.state_dict()

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full states on rank 0, ``{}`` elsewhere; all ranks call."""
        return full_optimizer_state_dict(optimizer)
