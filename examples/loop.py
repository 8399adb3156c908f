"""Trains in a complete loop, on any number of CPUs or GPUs; docs/training.md explains it."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

import zerocore

EPOCHS, BATCH, MICRO_BATCHES, WIDTH, CLASSES = 3, 8, 2, 256, 4


class Block(nn.Module):
    """A block of 2 MiB, so each is a unit: it is gathered while the block before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Makes noise in which the number at the index of the sample's class is larger."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (num_samples,), generator=draw)
    inputs = torch.randn(num_samples, WIDTH, generator=draw)
    inputs[torch.arange(num_samples), classes] += 5
    return TensorDataset(inputs, classes)


# -- the process group and this rank's device
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()

# -- this rank's part of the data; ranks may have different numbers of batches
data = make_data(201, seed=1)
own = Subset(data, range(rank, len(data), num_ranks))
loader = DataLoader(own, BATCH, shuffle=True, drop_last=True)
fewest = torch.tensor(len(loader) // MICRO_BATCHES, device=device)
dist.all_reduce(fewest, dist.ReduceOp.MIN)
num_steps = int(fewest)  # steps of an epoch, the same on all ranks
held_out = list(DataLoader(make_data(83, seed=2), BATCH))

# -- model, optimizer, schedule, checkpoints
model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)).to(device)
mixed = zerocore.MixedPrecision(
    torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)
zerocore.shard(model, stage=3, mixed_precision=mixed)
optimizer = zerocore.optim.AdamW(zerocore.param_groups(model, weight_decay=0.1), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=EPOCHS * num_steps)
checkpoints = zerocore.Checkpoints("checkpoints", model, optimizer, stateful={"schedule": schedule})


@torch.no_grad()
def evaluate() -> float:
    """Returns the mean loss over held-out samples. Each rank calls the model equally often."""
    model.eval()
    total = torch.zeros(2, device=device)  # the sum of losses, the number of samples
    for first in range(0, len(held_out), num_ranks):
        counts = first + rank < len(held_out)
        inputs, targets = held_out[first + rank if counts else -1]
        loss = cross_entropy(model(inputs.to(device)), targets.to(device), reduction="sum")
        total += counts * torch.stack([loss, torch.full_like(loss, len(targets))])
    model.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


start = checkpoints.load() or 0  # the newest one; None if there is none
for epoch in range(start + 1, EPOCHS + 1):
    batches = iter(loader)
    for _ in range(num_steps):
        for number in range(1, MICRO_BATCHES + 1):
            inputs, targets = next(batches)
            with nullcontext() if number == MICRO_BATCHES else zerocore.no_sync(model):
                loss = cross_entropy(model(inputs.to(device)), targets.to(device))
                (loss / MICRO_BATCHES).backward()
        norm = zerocore.clip_grad_norm_(model, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    checkpoints.save(epoch)  # in the background, while training goes on
    mean = evaluate()
    if rank == 0:
        print(f"epoch {epoch}: held-out loss {mean:.3f}, gradient norm {norm.item():.3f}")

with zerocore.unsharded(model), torch.no_grad():  # all ranks gather, rank 0 alone computes
    if rank == 0:
        print("classes:", model(held_out[0][0].to(device)).argmax(1).tolist())
weights = zerocore.full_state_dict(model)  # all ranks call it, rank 0 gets the weights
if rank == 0:
    torch.save(weights, "weights.pt")
checkpoints.wait()
dist.destroy_process_group()
