"""Accelerate's ``Accelerator`` for sharded models, without DDP and with sharded checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zerocore.common.extras import missing
from zerocore.hooks.optimizer_states import params_of
from zerocore.integrations.common import ShardFolders, check_precision
from zerocore.model.as_ddp import no_sync
from zerocore.model.state import find_state
from zerocore.state_dict import full_state_dict
from zerocore.tensor.rows import held_shard

try:
    import accelerate
except ModuleNotFoundError:
    raise missing("accelerate", "hf", "zerocore.integrations.accelerate") from None


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that does not wrap sharded models.

    Shard the model, build its optimizer, then prepare both. ``accumulate``, ``no_sync``,
    ``backward``, ``clip_grad_norm_``, ``save_state``, ``load_state``, ``get_state_dict`` and
    ``save_model`` work with sharded models. Other models are prepared as by Accelerate.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Registers a sharded ``model`` and returns it unchanged.

        Raises:
            ValueError: the accelerator's ``mixed_precision`` differs from the model's, or the
                accelerator compiles whole models.
        """
        state = find_state(model)
        if state is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        check_precision(state, self.mixed_precision, "Accelerator")
        if self.state.dynamo_plugin.backend.value.lower() not in ("no", ""):
            raise ValueError(
                "Accelerator: dynamo_backend compiles the whole model, which is sharded; leave it "
                "out and compile the model's blocks, as docs/training.md shows"
            )
        if not any(known is model for known in self._models):
            self._models.append(model)
        model.__dict__["_is_accelerate_prepared"] = True
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulates gradients without reducing them, as :func:`zerocore.no_sync`."""
        if find_state(model) is not None:
            return no_sync(model)
        return super().no_sync(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns full parameters on rank 0's CPU, ``{}`` on other ranks; all ranks must call."""
        if find_state(model) is not None:
            return full_state_dict(model)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Saves sharded models and their optimizers as shards, and the rest as Accelerate does.

        Shards are :class:`zerocore.Checkpoints` in the subfolder ``zerocore``, which any number of
        ranks can load. A second save to the same folder replaces the first.
        """
        with self._without_sharded() as sharded:
            folder = super().save_state(output_dir, *args, **kwargs)
        for shards in self._shards(sharded):
            shards.save(folder)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Loads a state of ``save_state``; raises FileNotFoundError if the folder has no shards."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = str(max(folders, key=lambda path: int(path.name.split("_")[-1])))
        with self._without_sharded() as sharded:
            super().load_state(input_dir, *args, **kwargs)
        for shards in self._shards(sharded):
            shards.load(str(input_dir))

    def _shards(self, sharded: list[tuple[nn.Module, Optimizer | None]]) -> list[ShardFolders]:
        known = self.__dict__.setdefault("_shard_folders", {})
        for index, (model, optimizer) in enumerate(sharded):
            name = "zerocore" if index == 0 else f"zerocore_{index}"
            if (index, id(optimizer)) not in known:
                known[index, id(optimizer)] = ShardFolders(model, optimizer, name)
        return [known[index, id(optimizer)] for index, (_, optimizer) in enumerate(sharded)]

    @contextmanager
    def _without_sharded(self) -> Iterator[list[tuple[nn.Module, Optimizer | None]]]:
        """Hides sharded models and their optimizers from Accelerate; yields them in pairs."""
        models, optimizers = self._models, self._optimizers
        sharded = [model for model in models if find_state(model) is not None]
        owners = {id(model): [o for o in optimizers if _updates(o, model)] for model in sharded}
        if any(len(owned) > 1 for owned in owners.values()):
            raise ValueError("a sharded model has several optimizers; use zerocore.Checkpoints")
        taken = {id(o) for owned in owners.values() for o in owned}
        self._models = [model for model in models if find_state(model) is None]
        self._optimizers = [o for o in optimizers if id(o) not in taken]
        try:
            yield [
                (model, next((o.optimizer for o in owners[id(model)]), None)) for model in sharded
            ]
        finally:
            self._models, self._optimizers = models, optimizers


def _updates(optimizer: Any, model: nn.Module) -> bool:
    state = find_state(model)
    return any(
        (shard := held_shard(param)) is not None and shard.state_ref() is state
        for param in params_of(optimizer)
    )
