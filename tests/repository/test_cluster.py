"""examples/cluster: two nodes and a killed rank under torchrun, Ray Train, files of schedulers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.nodes import Nodes, can_make_nodes
from tests.repository.test_examples import fork_quickstart, rank_environment

CLUSTER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
QUICKSTART = CLUSTER.parent / "quickstart.py"
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")


def load_yaml(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


@pytest.mark.parametrize("path", [CLUSTER / "torchrun.sh", CLUSTER / "slurm.sbatch"])
def test_a_shell_script_is_sound(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def words_for_torchrun(folder: Path, command: list[Any], **variables: str) -> str:
    """The arguments that a script gives to torchrun, in an environment without schedulers."""
    stub(folder, "torchrun", 'echo "torchrun $*; $NCCL_SOCKET_IFNAME"')
    stub(folder, "scontrol", "printf 'node-a\\nnode-b\\n'")
    stub(folder, "ip", "echo '3: ib0    inet 10.0.0.7/24 brd 10.0.0.255 scope global ib0'")
    stub(folder, "srun", 'while [[ $1 == -* ]]; do shift; done; exec "$@"')
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    found = subprocess.run(
        list(map(str, command)), env=env, cwd=CLUSTER.parents[1], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_slurm_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    root = str(CLUSTER.parents[1])
    words = words_for_torchrun(
        tmp_path, ["bash", CLUSTER / "slurm.sbatch", "train.py", "--steps", "3"],
        SLURM_JOB_NODELIST="node-[a-b]", SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="8",
        SLURM_JOB_ID="77", SLURM_SUBMIT_DIR=root, INTERFACE="ib0",
    )  # fmt: skip
    assert words == (
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-a:29400 "
        "--rdzv-id 77 --max-restarts 3 --local-addr 10.0.0.7 train.py --steps 3; ib0\n"
    )


def test_skypilot_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    task = load_yaml((CLUSTER / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and task["workdir"] == "." and task["envs"] == {"RUNS": None}
    words = words_for_torchrun(
        tmp_path, ["bash", "-euc", task["run"]], RUNS="/runs", SKYPILOT_TASK_ID="sky-1",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NUM_NODES="2",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
    )  # fmt: skip
    assert "--nnodes 2 --nproc-per-node 8" in words and "--rdzv-endpoint 10.0.0.1:29400" in words
    assert words.endswith("examples/quickstart.py --out /runs/quickstart; \n")


def test_the_trainjob_is_one() -> None:
    job = load_yaml((CLUSTER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer, (override,) = job["spec"]["trainer"], job["spec"]["podTemplateOverrides"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["command"][1].endswith("/examples/quickstart.py")
    (container,) = override["spec"]["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in override["spec"]["volumes"]}


def wait_for(path: Path, processes: list[subprocess.Popen[str]], seconds: float = 120) -> None:
    """Until there is a file or folder, while the processes live."""
    deadline = time.monotonic() + seconds
    while not any(path.parent.glob(path.name)):
        assert time.monotonic() < deadline, f"no {path}"
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def kill_a_rank(processes: list[subprocess.Popen[str]], is_rank: Any) -> None:
    """Kills the first process below these that is a rank."""
    below = [each for process in processes for each in psutil.Process(process.pid).children(True)]
    next(each for each in below if is_rank(each)).kill()


@contextmanager
def started(commands: list[list[Any]], logs: Path, env: dict[str, str]) -> Iterator[Any]:
    """The commands' processes and logs; they and all below them end with the block."""
    processes = []
    for number, words in enumerate(commands):
        with open(logs / f"log{number}", "w") as log:
            processes.append(
                subprocess.Popen(list(map(str, words)), env=env, stdout=log, stderr=log, text=True)
            )
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                for each in psutil.Process(process.pid).children(True):
                    each.kill()
                process.kill()
            process.wait()


@pytest.mark.nightly  # torch is imported in six processes
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_make_nodes(), reason="needs root and ip")
def test_two_nodes_start_again_after_a_rank_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    steps = 300
    folder = tmp_path / "nodes"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for torchrun
    with Nodes(2) as nodes:
        env = rank_environment() | {"HEAD": nodes.address(0), "INTERFACE": "eth0", "RANKS": "1"}
        words = [CLUSTER / "torchrun.sh", QUICKSTART, "--out", folder, "--steps", str(steps)]
        commands = [["ip", "netns", "exec", name, "bash", *words] for name in nodes.names]
        with started(commands, tmp_path, env | {"PATH": path}) as processes:
            wait_for(folder / "checkpoints" / "step-00000010", processes)
            kill_a_rank(processes, lambda each: each.environ().get("RANK") == "1")
            assert [process.wait(250) for process in processes] == [0, 0]
    text = "".join((tmp_path / f"log{node}").read_text() for node in range(2))
    assert re.search(r"resumes after step \d+0\n", text)
    assert "reloaded 106,880 parameters" in text
    shutil.copytree(folder / "base", tmp_path / "alone" / "base")
    alone = fork_quickstart(tmp_path / "alone", steps)  # on two ranks, without a kill
    assert dict(LOSS.findall(text))[str(steps)] == dict(LOSS.findall(alone))[str(steps)]


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ray_starts_workers_again(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    losses = []
    for kill in (False, True):
        folder = tmp_path / f"run{kill}"
        env = rank_environment() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        command = [sys.executable, CLUSTER / "ray_train.py", "--out", folder, "--steps", "60"]
        with started([command], tmp_path, env) as processes:
            if kill:
                wait_for(folder / "checkpoints" / "step-00000010", processes)
                kill_a_rank(processes, lambda each: "RayTrainWorker" in " ".join(each.cmdline()))
            assert [process.wait(150) for process in processes] == [0]
        text = (tmp_path / "log0").read_text()
        assert bool(re.search(r"resumes after step \d+0\n", text)) == kill
        losses.append(dict(LOSS.findall(text))["60"])
    assert losses[0] == losses[1]
