"""Gives a program one neutral way to shard, average, hold back and record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

WIDEST = torch.complex128
MUON_REST: dict[str, Any] = {"lr": 3e-3, "eps": 1e-5}  # of the AdamW beside Muon
Units = Sequence[type[nn.Module]]
State = dict[str, Tensor]


class Run:
    """One rank of one program under `plain`: replicas whose gradients are averaged by hand."""

    def __init__(self, seed: int, unused: bool) -> None:
        self.seed = seed
        self.unused = unused
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.models: list[nn.Module] = []
        self.records: list[Any] = []

    def shard(self, model: nn.Module, units: Units | None = None) -> Any:
        """The model as this system trains it; its full state at the end is compared."""
        wrapped = self.wrap(model, units)
        self.models.append(wrapped)
        return wrapped

    def wrap(self, model: nn.Module, units: Units | None) -> nn.Module:
        """The model itself; other systems override this and what follows."""
        return model

    def axis(self) -> dist.ProcessGroup | None:
        """Ranks that divide something else than batches; None where each rank has all of it."""
        return None

    def shard_experts(self, model: nn.Module, units: Units | None = None) -> Any:
        """As shard, of a model with different experts on each rank of ``axis``."""
        return self.shard(model, units)

    def shard_shared(self, model: nn.Module, units: Units | None = None) -> Any:
        """As shard, of a model whose losses are shares of one loss: gradients are summed."""
        return self.shard(model, units)

    def shard_cut(self, cut: Callable[[Any], nn.Module], whole: nn.Module) -> Any:
        """As shard, of what ``cut`` gives for a mesh of tensor parallelism, or of the whole."""
        return self.shard(whole)

    def module(self, model: nn.Module) -> Any:
        """The user's own module, for its attributes and methods."""
        return model

    def average(self, *models: nn.Module) -> None:
        """Averages gradients over the ranks, where the system does not do it in backward."""
        for model in models:
            average_gradients(list(model.parameters()))

    def average_one(self, parameter: nn.Parameter) -> None:
        """As average, for what runs while the backward does."""
        average_gradients([parameter])

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around micro-batches before the last one."""
        return nullcontext()

    def unsharded(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Full parameters, for reading."""
        return nullcontext()

    def full_state(self, model: nn.Module) -> State:
        """The full state dict, on every rank."""
        return dict(model.state_dict())

    def exported(self, model: nn.Module) -> State:
        """The same as an inference engine is given it, on every rank."""
        return self.full_state(model)

    def parked(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Around what needs the device's memory, where the system can lend it."""
        return nullcontext()

    def load(self, model: nn.Module, state: State) -> None:
        """Loads what full_state gave."""
        model.load_state_dict(state)

    def checkpoints(self, folder: str, model: nn.Module, optimizer: Optimizer) -> Any:
        """Saves, loads the newest one and returns its step, waits for what is under way."""
        return TorchCheckpoints(folder, model, optimizer)

    def optimizer(
        self, cls: type[Optimizer], params: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        """An optimizer, as a program makes it."""
        return cls(params, **options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's full state dict, on every rank."""
        return copy.deepcopy(optimizer.state_dict())

    def method(self, model: nn.Module, name: str) -> None:
        """Says that `name` is called in place of forward."""

    def muon(self, model: nn.Module, lr: float) -> list[Optimizer]:
        """Muon on the matrices of the blocks and AdamW on the rest."""
        named = list(model.named_parameters())
        matrices = [p for name, p in named if "blocks" in name and p.ndim == 2]
        rest = [p for name, p in named if not ("blocks" in name and p.ndim == 2)]
        return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, **MUON_REST)]

    def tensor(self, *shape: int, key: int = 0, shared: bool = False) -> Tensor:
        """Normal numbers that differ by program, key and (unless shared) rank."""
        rank = 0 if shared else 1 + self.rank
        generator = torch.Generator().manual_seed(self.seed * 1000 + key * 10 + rank)
        return torch.randn(*shape, generator=generator)

    def batches(self, count: int = 3, *shape: int) -> Iterator[Tensor]:
        """Inputs that differ by rank and step, of shape (4, 8) unless said."""
        return (self.tensor(*(shape or (4, 8)), key=key) for key in range(count))

    def tokens(self, vocabulary: int, *shape: int, key: int = 0) -> Tensor:
        """Whole numbers below `vocabulary` that differ by rank and key."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + key * 10 + self.rank)
        return torch.randint(vocabulary, shape, generator=generator)

    def record(self, *values: Any) -> None:
        """Numbers of this rank that must be those of plain."""
        self.records += tree_map(plain_copy, values)

    def final_states(self) -> list[State]:
        """Full states of all models, on every rank."""
        return [copy_tensors(self.full_state(model)) for model in self.models]


class ParallelRun(Run):
    """A system that divides a model over ``axis`` beside data parallelism."""

    experts: tuple[str, ...] = ()

    def axis(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def with_experts(self, state: State) -> State:
        """The state with all experts where a rank has its own."""
        return {name: _all_parts(v) if name in self.experts else v for name, v in state.items()}

    def other_mesh(self, name: str) -> Any:
        """Of one rank of data parallelism by all ranks of ``name``."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (1, self.world_size), mesh_dim_names=("dp", name))


class TorchCheckpoints:
    """get_state_dict and set_state_dict as torch's manual uses them."""

    def __init__(self, folder: str, model: nn.Module, optimizer: Optimizer) -> None:
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer

    def _state(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": states}

    def save(self, step: int) -> None:
        dcp.save(self._state(), checkpoint_id=self.folder / f"{step}")

    def load(self) -> int:
        newest, state = max(int(path.name) for path in self.folder.iterdir()), self._state()
        dcp.load(state, checkpoint_id=self.folder / f"{newest}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        return newest

    def wait(self) -> None:
        pass


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Means over the ranks; no gradient counts as zero, and stays None if no rank has one."""
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    # One collective for all; complex128 holds any dtype without loss.
    flat = torch.cat([used.to(WIDEST), *(g.detach().flatten().to(WIDEST) for g in grads)])
    dist.all_reduce(flat)
    counts, *means = flat.split([len(used), *(g.numel() for g in grads)])
    for parameter, grad, count, mean in zip(parameters, grads, counts, means, strict=True):
        if count.real > 0:
            mean = mean.view(grad.shape) / dist.get_world_size()
            parameter.grad = grad.copy_(mean if grad.is_complex() else mean.real)


def _all_parts(part: Any) -> Tensor:
    """Of a tensor that is cut along its first dimension into equal parts, one on each rank."""
    own = full_tensor(part).detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)


def full_tensor(value: Any) -> Any:
    """All of a DTensor; other things as they are."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def plain_copy(value: Any) -> Any:
    """A full copy of a tensor that later steps do not change; other things as they are."""
    full = full_tensor(value)
    if not isinstance(full, Tensor):
        return full
    with torch._C.DisableTorchFunctionSubclass():
        return full.detach().clone().as_subclass(Tensor)


def copy_tensors(state: dict[str, Any]) -> State:
    """Copies of a state; what is no tensor is left out."""
    return {name: plain_copy(t) for name, t in state.items() if isinstance(t, Tensor)}
