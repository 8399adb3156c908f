"""Importing zerocore replaces nothing in torch; the first model that is sharded installs it all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.scripts import run_program

SNAPSHOT = """
import sys
import warnings
from pkgutil import resolve_name
import torch, torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.checkpoint
import torch.distributed.tensor.debug
from torch.distributed.tensor import DTensor
from torch.nn.init import orthogonal_ as imported_by_name

warnings.simplefilter("ignore")  # of old names that are looked at below

def attributes():
    found = {}
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        for key, value in list(vars(sys.modules[name]).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("torch"):
                found.update({(name, key, own): each for own, each in vars(value).items()})
            elif isinstance(value, (list, dict)) and ("hooks" in key or "foreach" in key):
                found[name, key, "entries"] = len(value)
    return found

def changed(before):
    after = attributes()
    return [key for key in before if before[key] is not after.get(key)]

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # torch changes the class in the first one
before = attributes()
finders = list(sys.meta_path)
import zerocore, zerocore.fsdp
"""
NOTHING_CHANGED = """
loadable = ("torch._weights_only_unpickler", "_marked_safe_globals_set")  # torch.load of shards
assert [key for key in changed(before) if key != loadable] == []
assert sys.meta_path == finders
"""
SHARD = "zerocore.shard(torch.nn.Linear(4, 4))"
FULLY_SHARD = """
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
before.update(attributes())
zerocore.fsdp.fully_shard(torch.nn.Linear(4, 4))
"""
ALL_CHANGED = """
from zerocore.hooks.patches import PATCHES
from zerocore.install import MORE_PATCHES
found = set(changed(before))
missing = []
for patch in (*PATCHES, *MORE_PATCHES):
    if not patch.owner.startswith("torch."):
        continue  # test_hub_saves imports those packages
    owner = resolve_name(patch.owner)
    path = (owner.__module__, owner.__name__) if isinstance(owner, type) else (owner.__name__,)
    due = patch.before is None or torch.__version__ < patch.before
    patched = (*path, patch.name) in found or (*path, patch.name) not in before  # or inherited
    if patched != due or not hasattr(owner, patch.name):
        missing.append(patch)
assert missing == [], missing
for hooks in (
    ("torch.nn.modules.module", "_global_parameter_registration_hooks"),
    ("torch.nn.modules.module", "_global_module_registration_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    ("torch.optim.optimizer", "_foreach_supported_types"),
):
    assert (*hooks, "entries") in found, hooks
assert imported_by_name is torch.nn.init.orthogonal_
assert len(sys.meta_path) == len(finders) + 1
"""
EARLIER_OPTIMIZER = """
import torch
import zerocore
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the class has hooks around its step
model = zerocore.shard(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
seen = []
optimizer.register_step_pre_hook(lambda opt, *_: seen.append(model.weight.grad.shape))
optimizer.register_step_post_hook(lambda opt, *_: seen.append(opt.state[model.weight]["exp_avg"]))
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert seen[0] == (4, 4), seen  # hooks go by the rules of shards
assert type(seen[1]) is zerocore.tensor.LocalShard, seen  # the step gives states a place
assert len(seen) == 2, seen
"""

DEVICES = """
import torch, zerocore

torch.distributed.init_process_group("gloo")
zerocore.shard(torch.nn.Linear(4, 4))
made = {
    torch.tensor: [1.0], torch.as_tensor: [1.0], torch.asarray: [1.0], torch.zeros: 2,
    torch.empty: 2, torch.rand: 2, torch.full: ((2,), 1.0), torch.arange: 3,
    torch.linspace: (0, 1, 3),
}
made = {make: args if isinstance(args, tuple) else (args,) for make, args in made.items()}
with torch.device("meta"):
    assert [make.__name__ for make, args in made.items() if not make(*args).is_meta] == []
torch.set_default_device("meta")
assert [make.__name__ for make, args in made.items() if not make(*args).is_meta] == []
"""


@pytest.mark.parametrize(
    "script",
    [
        SNAPSHOT + NOTHING_CHANGED + SHARD + ALL_CHANGED,
        pytest.param(SNAPSHOT + FULLY_SHARD + ALL_CHANGED, marks=pytest.mark.nightly),
    ],
    ids=["shard", "fully_shard"],
)
def test_patches(script: str) -> None:
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_an_optimizer_made_before_the_first_model_is_sharded() -> None:
    ((code, output),) = run_program(EARLIER_OPTIMIZER, 1)
    assert code == 0, output


def test_tensors_are_made_on_the_device_of_the_context() -> None:
    ((code, output),) = run_program(DEVICES, 1)
    assert code == 0, output
