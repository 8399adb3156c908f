"""Lists the public optimizers of the installed packages, and the options that each one gets."""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# Each package by the module that shows its optimizers. A missing package is left out.
MODULES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "transformers.optimization": "transformers",
    "torch_optimizer": "torch-optimizer",
    "optimi": "torch-optimi",
    "heavyball": "heavyball",
    "schedulefree": "schedulefree",
    "dadaptation": "dadaptation",
    "prodigyopt": "prodigyopt",
    "prodigyplus": "prodigy-plus-schedule-free",
    "lion_pytorch": "lion-pytorch",
    "adabelief_pytorch": "adabelief-pytorch",
    "adabound": "adabound",
    "adamp": "adamp",
    "adam_atan2_pytorch": "adam-atan2-pytorch",
    "adam_mini": "adam-mini",
    "adan_pytorch": "adan-pytorch",
    "came_pytorch": "came-pytorch",
    "galore_torch": "galore-torch",
    "grokadamw": "grokadamw",
    "kron_torch": "kron-torch",
    "madgrad": "madgrad",
    "muon": "muon-optimizer",
    "apollo_torch": "apollo-torch",
    "SM3": "torch-sm3",
    "pytorch_ranger": "pytorch-ranger",
    "bitsandbytes.optim": "bitsandbytes",
    "torchao.optim": "torchao",
}
# Optimizers that plain replicas cannot use with averaged gradients, and why.
LEFT_OUT = {
    "torch.optim.SparseAdam": "takes sparse gradients only",
    "pytorch_optimizer.GSAM": "averages gradients itself, through DistributedDataParallel",
    "pytorch_optimizer.PCGrad": "has a backward of its own",
    "pytorch_optimizer.SafeFP16Optimizer": "has a backward of its own",
    "pytorch_optimizer.LOMO": "updates within the backward",
    "pytorch_optimizer.AdaLOMO": "updates within the backward",
    "pytorch_optimizer.AdaHessian": "differentiates the rank's own gradients",
    "pytorch_optimizer.SophiaH": "differentiates the rank's own gradients",
    "torch_optimizer.Adahessian": "differentiates the rank's own gradients",
    "pytorch_optimizer.LoRARite": "trains pairs of LoRA matrices only",
    "transformers.optimization.LayerWiseDummyOptimizer": "does nothing",
    "heavyball.PSGDBase": "a base class",
    "heavyball.SOAPBase": "a base class",
    "prodigyplus.CoreOptimiser": "a base class",
    "torchao.optim.CPUOffloadOptimizer": "needs a GPU",
    "galore_torch.GaLoreAdamW8bit": "needs a GPU",
    "apollo_torch.GaLoreAdamW8bit": "needs a GPU",
    "apollo_torch.QAPOLLOAdamW": "needs a GPU",
    "kron_torch.DistributedKron": "needs a GPU",
    "kron_torch.DistributedOneSidedKron": "needs a GPU",
}
# Options by name, so that a few steps show all that an optimizer does.
LEARNING_RATE = 0.01
SHOWN_SOON = {
    "d0": 1e-3,
    "keep_num": 3,
    "k": 3,
    "precondition_frequency": 3,
    "update_proj_gap": 3,
    "num_iterations": 8,
    "num_data": 8,
    "s_prev": 0.01,
    "relative_step": False,  # else no learning rate may be given
}
# SGD without momentum is no optimizer of bitsandbytes.
MOMENTUM = ("bitsandbytes.optim.SGD", "bitsandbytes.optim.LARS")
FOUND_RATE = ("DAdapt", "Prodigy")  # find the learning rate, of which `lr` is a multiple


@dataclass(frozen=True)
class Listed:
    """One public optimizer."""

    name: str
    cls: type[Optimizer]
    options: dict[str, Any]

    @property
    def short(self) -> str:
        """The name without the module's."""
        return self.name.rpartition(".")[2]

    @property
    def package(self) -> str:
        """The package as pip calls it."""
        return MODULES[self.name.rpartition(".")[0]]


def all_optimizers() -> list[Listed]:
    """Every public optimizer of what is installed, each class once."""
    found: dict[type[Optimizer], Listed] = {}
    for module in MODULES:
        for name, value in sorted(_members(module).items()):
            full = f"{module}.{name}"
            if full not in LEFT_OUT:
                found.setdefault(value, _listed(full, value))
    return list(found.values())


def optimizer_named(name: str) -> Listed:
    """The optimizer of a full name."""
    module, _, short = name.rpartition(".")
    return _listed(name, _members(module)[short])


def _members(module: str) -> dict[str, type[Optimizer]]:
    """The optimizers that a module shows."""
    torch.compiler.set_stance("force_eager")  # some compile their steps, for minutes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown: Any = importlib.import_module(module)
    except ImportError:
        return {}
    values = {name: getattr(shown, name, None) for name in dir(shown) if name[0] != "_"}
    return {
        name: value
        for name, value in values.items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }


def _listed(name: str, cls: type[Optimizer]) -> Listed:
    """With a moderate learning rate, and with options that act within few steps."""
    known = inspect.signature(cls).parameters
    options = {key: value for key, value in SHOWN_SOON.items() if key in known}
    if "lr" in known and not any(word in name for word in FOUND_RATE):
        options["lr"] = LEARNING_RATE
    if name.startswith(MOMENTUM):
        options["momentum"] = 0.9
    return Listed(name, cls, options)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with two dimensions."""
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    """All other parameters."""
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


def matrices_alike(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The square matrices, which have one shape, and all other parameters."""
    alike = [p for p in matrices(model) if p.shape[0] == p.shape[1]]
    return alike, [p for p in model.parameters() if all(p is not other for other in alike)]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Groups as Muon's relatives read them."""
    return [
        {"params": matrices(model), "use_muon": True},
        {"params": others(model), "use_muon": False},
    ]


SGD = partial(torch.optim.SGD, lr=0.05)
