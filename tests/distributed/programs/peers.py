"""The peers of zerocore: DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.programs.run import ParallelRun, State, Units, copy_tensors


class DdpRun(ParallelRun):
    """DistributedDataParallel; buffers stay each rank's own, as in the others."""

    def shard_experts(self, model: nn.Module, units: Units | None = None) -> Any:
        # DDP's way to leave parameters alone.
        self.experts = tuple(name for name, _ in model.named_parameters() if ".experts." in name)
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, self.experts)
        return self.shard(model, units)

    def shard_shared(self, model: nn.Module, units: Units | None = None) -> Any:
        wrapped = self.shard(model, units)
        wrapped.register_comm_hook(None, lambda _, bucket: _sum_of(bucket))
        return wrapped

    def shard_cut(self, cut: Callable[[Any], nn.Module], whole: nn.Module) -> Any:
        mesh = self.other_mesh("tp")
        model = DistributedDataParallel(cut(mesh["tp"]), process_group=mesh.get_group("dp"))
        self.models.append(model)
        return model

    def wrap(self, model: nn.Module, units: Units | None) -> nn.Module:
        if not any(p.requires_grad for p in model.parameters()):
            return model  # a teacher: it refuses what has nothing to average
        return DistributedDataParallel(
            model, broadcast_buffers=False, find_unused_parameters=self.unused
        )

    def module(self, model: nn.Module) -> Any:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def average(self, *models: nn.Module) -> None:
        for model in models:
            for name, param in self.module(model).named_parameters():
                if name in self.experts and param.grad is not None:
                    param.grad /= self.world_size

    def average_one(self, parameter: nn.Parameter) -> None:
        pass

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync()

    def full_state(self, model: nn.Module) -> State:
        return self.with_experts(dict(self.module(model).state_dict()))

    def load(self, model: nn.Module, state: State) -> None:
        self.module(model).load_state_dict(state)


class Fsdp2Run(ParallelRun):
    """fully_shard of every unit and of the root."""

    def wrap(self, model: nn.Module, units: Units | None) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.world_size,))
        for module in list(model.modules()):
            if units and module is not model and isinstance(module, tuple(units)):
                fully_shard(module, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def shard_experts(self, model: nn.Module, units: Units | None = None) -> Any:
        from torch.distributed.fsdp import fully_shard

        self.experts = tuple(name for name, _ in model.named_parameters() if ".experts." in name)
        for name, module in list(model.named_modules()):
            if name.endswith(".experts"):
                fully_shard(module, mesh=self.other_mesh("ep")["dp"])
                _divide_by(module, self.world_size)
        return self.shard(model, units)

    def shard_shared(self, model: nn.Module, units: Units | None = None) -> Any:
        wrapped = self.shard(model, units)
        for module in wrapped.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                _divide_by(module, 1)
        return wrapped

    def shard_cut(self, cut: Callable[[Any], nn.Module], whole: nn.Module) -> Any:
        from torch.distributed.fsdp import fully_shard

        mesh = self.other_mesh("tp")
        model = fully_shard(cut(mesh["tp"]), mesh=mesh["dp"])
        self.models.append(model)
        return model

    def average(self, *models: nn.Module) -> None:
        pass

    def average_one(self, parameter: nn.Parameter) -> None:
        pass

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        from torch.distributed.fsdp import FSDPModule

        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.unshard()
        yield
        for module in modules:
            module.reshard()

    def full_state(self, model: nn.Module) -> State:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True)
        return self.with_experts(get_model_state_dict(model, options=options))

    def final_states(self) -> list[State]:
        states = [copy_tensors(dict(model.state_dict())) for model in self.models]
        return [self.with_experts(state) for state in states]

    def load(self, model: nn.Module, state: State) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))

    def method(self, model: nn.Module, name: str) -> None:
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, name)


def _sum_of(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """In the place of DDP's mean."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    done: Any = work.get_future().then(lambda future: future.value()[0])
    return done


def _divide_by(module: Any, factor: float) -> None:
    """gloo divides no sums."""
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(factor)
