"""Strategies that shard models for Lightning's ``Trainer`` and ``Fabric``."""

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
    """The common base of both strategies: it has the options of ``shard``, such as precision."""

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
            raise ValueError(f"precision={name!r} does not work sharded; use 'bf16-mixed'")
        self._shard_options.setdefault("mixed_precision", mixed_precision("bf16"))
        return plain


class ShardedStrategy(_Sharding, DDPStrategy):
    """A strategy without DDP: ``lightning.pytorch.Trainer(strategy=ShardedStrategy(stage=3))``.

    The LightningModule is sharded before ``configure_optimizers``. ``precision="bf16-mixed"``
    becomes ``mixed_precision``. A checkpoint is one complete file, as with DDP: weights and
    optimizer states are gathered to rank 0's CPU, and load at any stage, on any number of ranks.

    Args:
        options: options of :func:`zerocore.shard`, and of DDPStrategy ``accelerator``,
            ``parallel_devices``, ``cluster_environment`` and ``process_group_backend``.

    Raises:
        ValueError: a mixed precision is not ``"bf16-mixed"``.
    """

    model: Any

    @property
    def precision_plugin(self) -> Any:
        """The plugin for the dtype of inputs and modules; the default one for mixed precision."""
        return DDPStrategy.precision_plugin.fget(self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        plain = self._take_precision(plugin, (MixedPrecision,), Precision())
        DDPStrategy.precision_plugin.fset(self, plain)

    def setup(self, trainer: Any) -> None:
        """Shards the module if the trainer fits it; a sharded one is used as it is."""
        if trainer.state.fn == TrainerFn.FITTING or find_state(self.model) is None:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        self.setup_precision_plugin()  # no broadcast: ranks hold different elements

    def configure_ddp(self) -> None:
        """Shards the module; DDPStrategy would wrap it here."""
        self.model = self._shard(self.model)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates gradients without reducing them, as :func:`zerocore.no_sync`."""
        with no_sync(self.model):
            yield

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        short = {"training_step": "train_step", "validation_step": "val_step"}.get(name, name)
        # The step runs inside of the module's forward, in which gathers are prefetched.
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
        """Returns full values on rank 0, ``{}`` on other ranks; all ranks must call."""
        if find_state(self.lightning_module) is None:
            return dict(self.lightning_module.state_dict())
        return full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns full states on rank 0, ``{}`` on other ranks; all ranks must call."""
        return full_optimizer_state_dict(getattr(optimizer, "_optimizer", optimizer))


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()


class ShardedFabricStrategy(_Sharding, FabricDDPStrategy):
    """A strategy without DDP: ``lightning.Fabric(strategy=ShardedFabricStrategy(stage=3))``.

    ``model, optimizer = fabric.setup(model, optimizer)`` and ``fabric.setup_module(model)`` shard
    the model. Precision and checkpoints are the same as with :class:`ShardedStrategy`.

    Raises:
        ValueError: a mixed precision is not ``"bf16-mixed"``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _NoSync()

    @property
    def precision(self) -> Any:
        """The plugin for the dtype of inputs and models; the default one for mixed precision."""
        return FabricDDPStrategy.precision.fget(self)

    @precision.setter
    def precision(self, plugin: Any) -> None:
        plain = self._take_precision(plugin, (FabricMixedPrecision,), FabricPrecision())
        FabricDDPStrategy.precision.fset(self, plain)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shards ``module`` in place, unless it is sharded."""
        return self._shard(module)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns full values on rank 0, ``{}`` on other ranks; all ranks must call."""
        return full_state_dict(module) if find_state(module) is not None else module.state_dict()

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns full states on rank 0, ``{}`` on other ranks; all ranks must call."""
        return full_optimizer_state_dict(optimizer)
