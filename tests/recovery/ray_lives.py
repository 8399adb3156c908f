"""Workers of Ray Train of which one is lost with its node, and the others' memory brings it back.

``python -m tests.recovery.ray_lives FOLDER KILL/POINT/VICTIM ...`` loses each named worker at its
point; STOP in place of KILL stops it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from tests.recovery import lives

WORLD_SIZE = 3


def train(fault: dict[str, Any]) -> None:
    """Each worker's folder is a node's memory, which is lost with the worker."""
    folder, rank = Path(fault["folder"]), dist.get_rank()
    mark = folder / "fault"

    def lose(*_: Any) -> None:
        mark.touch()
        shutil.rmtree(folder / f"node{rank}", ignore_errors=True)
        os.kill(os.getpid(), signal.Signals[f"SIG{fault['kind']}"])

    is_lost = rank == fault["victim"] and not mark.exists()
    life = lives.train(folder / f"node{rank}", fault["point"] if is_lost else "", lose)
    (folder / f"life{rank}").write_text(json.dumps(life))


def main() -> None:
    ray.init(num_cpus=WORLD_SIZE + 1)  # also where there are fewer: they wait for each other
    for name in sys.argv[2:]:
        kind, point, victim = name.split("/")
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True)
        config = {"folder": str(folder), "kind": kind, "point": point, "victim": int(victim)}
        TorchTrainer(
            train,
            train_loop_config=config,
            torch_config=TorchConfig(backend="gloo", timeout_s=20),
            scaling_config=ScalingConfig(num_workers=WORLD_SIZE),
            run_config=RunConfig(
                storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()


if __name__ == "__main__":
    main()
