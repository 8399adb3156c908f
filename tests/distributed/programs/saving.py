"""Programs: state dicts saved, loaded and copied."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from tests.distributed.programs.models import Block, Net, adamw, mean_square, train, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run


def saved_and_loaded(value: Any, **options: Any) -> Any:
    """A round trip through torch.save."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@program("torch.save(model.state_dict()) on each rank, loaded by the same rank")
def save_each_rank(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    state = saved_and_loaded(run.module(model).state_dict(), weights_only=False)
    train(run, model)
    run.module(model).load_state_dict(state)
    train(run, model)


@program("the same, with torch.load's default (weights_only)")
def save_each_rank_safe(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    state = saved_and_loaded(run.module(model).state_dict())
    train(run, model)
    run.module(model).load_state_dict(state)
    train(run, model)


@program("rank 0's model.state_dict() loaded into a plain model")
def save_rank_0(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    state = {name: value.cpu() for name, value in run.module(model).state_dict().items()}
    plain = Net()
    plain.load_state_dict(state)
    run.record(plain(run.tensor(4, 8)))


@program("the full state dict, saved and loaded into a plain model")
def save_full(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    plain = Net()
    plain.load_state_dict(saved_and_loaded(run.full_state(model)))
    run.record(plain(run.tensor(4, 8)))


@program("the full state dict loaded into the sharded model again")
def load_full(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    state = saved_and_loaded(run.full_state(model))
    train(run, model)
    run.load(model, state)
    train(run, model)


@program("a full state dict with a buffer of a wrong shape is refused on all ranks")
def load_wrong_buffer(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    state = dict(run.full_state(model))
    name = next(name for name in state if name.endswith("running_mean"))
    state[name] = torch.zeros(5)
    try:
        run.load(model, state)
    except (ValueError, RuntimeError):
        run.record("refused")
    run.record(model(run.tensor(4, 8)).mean())


@program("buffers of complex numbers, int16 and bool in a full state dict")
def load_rare_buffers(run: Run) -> None:
    net: Any = Net()
    net.register_buffer("waves", torch.ones(3, dtype=torch.complex64))
    net.register_buffer("counts", torch.ones(3, dtype=torch.int16))
    net.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    model = run.shard(net, [Block])
    run.load(model, run.full_state(model))
    train(run, model)


@program("a plain checkpoint loaded by model.load_state_dict after sharding")
def load_plain_checkpoint(run: Run) -> None:
    torch.manual_seed(3)
    state = Net().state_dict()
    model = run.shard(Net(), [Block])
    run.module(model).load_state_dict(state)
    train(run, model)


@program("a plain checkpoint loaded with strict=False, one block only")
def load_partial(run: Run) -> None:
    state = {k: v for k, v in Net().state_dict().items() if k.startswith("blocks.0")}
    model = run.shard(Net(), [Block])
    run.module(model).load_state_dict(state, strict=False)
    train(run, model)


@program("copy.deepcopy(model.state_dict()) as the best one so far, loaded at the end")
def best_state(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    best = copy.deepcopy(run.module(model).state_dict())
    train(run, model)
    run.module(model).load_state_dict(best)


@program("a dict of clones of the state dict, loaded at the end")
def best_state_clones(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    best = {name: value.clone() for name, value in run.module(model).state_dict().items()}
    train(run, model)
    run.module(model).load_state_dict(best)


@program("torch.distributed.checkpoint: save and load of model.state_dict()")
def dcp_round_trip(run: Run) -> None:
    model = run.shard(Net(), [Block])
    train(run, model)
    with shared_folder() as folder:
        dcp.save(run.module(model).state_dict(), checkpoint_id=folder)
        train(run, model)
        state = run.module(model).state_dict()
        dcp.load(state, checkpoint_id=folder)
        run.module(model).load_state_dict(state)
    train(run, model)


@contextmanager
def shared_folder() -> Iterator[str]:
    """One folder of all ranks, deleted when all have done with it."""
    with tempfile.TemporaryDirectory() as folder:
        place = [folder]
        dist.broadcast_object_list(place)
        yield place[0]
        dist.barrier()


def new_training(run: Run) -> tuple[Any, torch.optim.Optimizer]:
    """The model and optimizer that a process begins with."""
    model = run.shard(Net(), [Block])
    return model, adamw(model.parameters())


@program("saved every 2 steps by zerocore.Checkpoints (others: as below), resumed in a new model")
def checkpoints_resumed(run: Run) -> None:
    batches = list(run.batches(6))
    with shared_folder() as folder:
        model, optimizer = new_training(run)
        checkpoints = run.checkpoints(folder, model, optimizer)
        for step, x in enumerate(batches[:5], 1):
            update(run, model, optimizer, mean_square(model(x)))
            if step % 2 == 0:
                checkpoints.save(step)
        checkpoints.wait()
        model, optimizer = new_training(run)
        first = run.checkpoints(folder, model, optimizer).load()
        for x in batches[first:]:
            update(run, model, optimizer, mean_square(model(x)))


@program("saved every 2 steps by torch.distributed.checkpoint, resumed in a new model")
def dcp_resumed(run: Run) -> None:
    batches = list(run.batches(6))
    with shared_folder() as folder:
        model, optimizer = new_training(run)
        for step, x in enumerate(batches[:5], 1):
            update(run, model, optimizer, mean_square(model(x)))
            if step % 2 == 0:
                weights, states = get_state_dict(model, optimizer)
                saved = {"model": weights, "optim": states, "step": step}
                dcp.save(saved, checkpoint_id=f"{folder}/{step}")
        model, optimizer = new_training(run)
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optim": states, "step": 0}
        dcp.load(saved, checkpoint_id=f"{folder}/4")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optim"],
        )
        for x in batches[saved["step"] :]:
            update(run, model, optimizer, mean_square(model(x)))


@program("get_state_dict and set_state_dict of model and optimizer, full")
def dcp_state_dict(run: Run) -> None:
    model = run.shard(Net(), [Block])
    optimizer = adamw(model.parameters())
    train(run, model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    states, optimizer_states = get_state_dict(model, optimizer, options=options)
    optimizer = adamw(model.parameters())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states,
        optim_state_dict=optimizer_states,
        options=options,
    )
    train(run, model, optimizer)


@program("the names in state_dict and named_parameters are those of the plain model")
def names_stay(run: Run) -> None:
    model = run.shard(Net(), [Block])
    net = run.module(model)
    run.record(list(net.state_dict()), [name for name, _ in net.named_parameters()])


@program("torch.save(model) of the whole model")
def save_model(run: Run) -> None:
    model = run.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    twin = saved_and_loaded(run.module(model), weights_only=False)
    run.record(twin(run.tensor(4, 8)))
