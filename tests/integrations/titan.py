"""torchtitan's own trainer on gloo ranks, over FSDP2 of torch and of zerocore.

python -m tests.integrations.titan [CASE ...]

Prints losses of both beside each other. The trainer, its models and its configurations are
torchtitan's as they come; over zerocore.fsdp in their default configuration (spmd_types). FSDP2
takes that from torch 2.14 on, so before it runs with ``spmd_backend=partial_dtensor``: the same
shards and, but for a router's gradient, the same sums. Models keep two of their layers, in
pipelines four. Tokens are bytes, texts are sources of Python's own library.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import types
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.harness import RanksFailed, run_ranks
from tests.integrations.fully_sharded import ENGINES, engine

STEPS = 5
SAVED = 3
TIMEOUT = 300.0  # seconds for a run
BASE = (
    "--debug.seed=42",
    "--training.seq-len=128",
    "--training.local-batch-size=2",
    f"--training.steps={STEPS}",
    "--checkpoint.enable",
    f"--checkpoint.interval={SAVED}",
)
MODELS = {
    "llama3": ("--module=llama3", "--config=llama3_debugmodel"),
    "qwen3": ("--module=qwen3", "--config=qwen3_moe_debug"),
}
# FSDP2 before torch 2.14 takes DTensors of tensor parallelism, and no annotations.
PARTIAL = ("--parallelism.spmd-backend=partial_dtensor",)


@dataclass(frozen=True)
class Case:
    """A parallelism: on how many ranks, and torchtitan's options for it."""

    ranks: int
    options: tuple[str, ...] = ()


def _of(ranks: int, *options: str) -> Case:
    return Case(ranks, tuple(f"--{option}" for option in options))


PARALLELISMS = {
    "fsdp": _of(2),
    "hsdp": _of(4, "parallelism.data-parallel-replicate-degree=2"),
    "tp": _of(4, "parallelism.tensor-parallel-degree=2"),
    "cp": _of(4, "parallelism.context-parallel-degree=2", "training.seq-len=512"),
    "ep": _of(4, "parallelism.expert-parallel-degree=2", "training.disable-cuda-graphs"),
    "pp_zbv": _of(
        4,
        "parallelism.pipeline-parallel-degree=2",
        "parallelism.pipeline-parallel-schedule=ZBVZeroBubble",
        "training.local-batch-size=4",
        "training.disable-cuda-graphs",
    ),
}
# Over FSDP2 a zero-bubble stage whose head runs in chunks loses the gradient of its last norm.
PARALLELISMS["pp_zbv_whole_loss"] = PARALLELISMS["pp_zbv"]
CASES = {f"{model}-{name}": (model, name) for model in MODELS for name in PARALLELISMS}


def stand_in_for_a_device() -> None:
    """The trainer asks an accelerator for a name, figures of memory and kernels."""
    cpu: Any = torch.cpu
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    cpu.get_device_name = lambda *_: "CPU"
    cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34, name="CPU")
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = Mock()  # Triton's, not called
    importlib.import_module("torchtitan.trainer")
    titan: Any = sys.modules["torchtitan.distributed.utils"]
    titan.set_pg_timeouts = lambda **_: None  # gloo has none to set
    attention: Any = sys.modules["torchtitan.models.common.attention"]
    parallel: Any = importlib.import_module(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    for module in (attention, parallel):
        module._compiled_create_block_mask = flex.create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(_attend)


def _attend(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any):
    """As flex_attention, which has no backward on the CPU."""
    flex: Any = sys.modules["torch.nn.attention.flex_attention"]
    mask = flex.create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], q.device)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def stand_in_for_torch_and_gloo() -> None:
    """Schedules take micro-batches; gloo neither divides sums nor exchanges unequal parts.

    torch's ``local_map`` detaches an input of an asynchronous ``redistribute``: experts under
    tensor parallelism give it no gradient. ``redistribute`` is synchronous here.
    """
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    schedules.PipelineScheduleMulti.step = _step_of_micro_batches
    module: Any = importlib.import_module("torch.distributed.fsdp").FSDPModule
    stock = module.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        stock(self, factor)

    module.set_gradient_divide_factor = set_gradient_divide_factor
    redistribute = DTensor.redistribute

    def redistribute_and_wait(self: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return redistribute(self, *args, **kwargs)

    DTensor.redistribute = redistribute_and_wait  # type: ignore[method-assign]
    dist.all_to_all = _all_to_all  # type: ignore[assignment]  # gloo's takes equal sizes only


def _all_to_all(outputs: list[Any], inputs: list[Any], group: Any = None, **_: Any) -> None:
    sizes = [each.numel() for each in outputs]
    sent = torch.cat([each.reshape(-1) for each in inputs])
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [each.numel() for each in inputs], group=group)
    for output, part in zip(outputs, received.split(sizes), strict=True):
        output.copy_(part.view_as(output))


def _step_of_micro_batches(
    self: Any,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
    losses: Any,
    loss_kwargs: Any,
    return_outputs: bool,
) -> None:
    for stage in self._stages:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)


def write_assets(folder: Path) -> None:
    """A tokenizer of bytes, and texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: index for index, token in enumerate([*alphabet, "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    library = Path(os.__file__).parent
    sources = [(library / f"{name}.py").read_text() for name in ("ast", "bdb", "cmd", "csv", "dis")]
    parts = [text[at : at + 1500] for text in sources for at in range(0, len(text), 1500)]
    lines = [json.dumps({"text": part}) for part in parts]
    (folder / "texts" / "data.json").write_text("\n".join(lines))


def train_rank(
    name: str, options: tuple[str, ...], folder: str, whole_loss: bool
) -> list[tuple[float, float]]:
    """Loss and norm of each step, as torchtitan logs them."""
    torch.set_num_threads(1)
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HOME=f"{folder}/hf", LOCAL_RANK="0")
    with engine(name):
        stand_in_for_a_device()
        stand_in_for_torch_and_gloo()
        from torchtitan.config import ConfigManager

        config: Any = ConfigManager().parse_args([*options, f"--hf-assets-path={folder}"])
        config.dataloader.dataset_path = f"{folder}/texts"
        if config.parallelism.pipeline_parallel_degree > 1:
            config.activation_checkpoint = None  # torch recomputes for one backward, not for two
        if whole_loss:
            config.loss = config.loss.loss_fn  # not in chunks of the sequence
        model: Any = config.model_spec.model
        model.layers = model.layers[: 4 if config.activation_checkpoint is None else 2]
        trainer = config.build()
        figures: list[tuple[float, float]] = []
        log = trainer.metrics_processor.log

        def note(step: int, loss: float, most: float, norm: float, **kwargs: Any) -> None:
            figures.append((loss, norm))
            log(step, loss, most, norm, **kwargs)

        trainer.metrics_processor.log = note
        try:
            trainer.train()
        finally:
            trainer.close()
    return figures


def train(
    case: str, name: str, folder: str, *options: str, run: str = "", timeout: float = TIMEOUT
) -> list[float]:
    """Losses of all steps, then norms; checkpoints of runs of one name lie together."""
    model, parallelism = CASES[case]
    found = PARALLELISMS[parallelism]
    backend = PARTIAL if name == "torch" else ()
    options = (*MODELS[model], *BASE, *found.options, *backend, *options)
    options = (*options, f"--dump-folder={folder}/{case}-{run or name}")
    whole_loss = parallelism.endswith("whole_loss")
    given = (name, options, folder, whole_loss)
    ranks = run_ranks(train_rank, found.ranks, *given, launch="torchrun", timeout=timeout)
    figures = max(ranks)  # a pipeline's loss is where its last stage is, others log less than 0
    return [loss for loss, _ in figures] + [norm for _, norm in figures]


def resume(
    case: str, name: str, folder: str, *options: str, run: str = "", timeout: float = TIMEOUT
) -> list[float]:
    """As ``train``, of the steps behind the one that was saved."""
    options = (*options, f"--checkpoint.load-step={SAVED}")
    return train(case, name, folder, *options, run=run, timeout=timeout)


def difference(found: list[float], expected: list[float]) -> float:
    """The largest, relative."""
    assert len(found) == len(expected) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def behind(figures: list[float]) -> list[float]:
    """Those of the steps behind the one that was saved."""
    steps = len(figures) // 2
    return figures[SAVED:steps] + figures[steps + SAVED :]


def row(case: str, folder: str, options: list[str], timeout: float = TIMEOUT) -> list[str]:
    """One row of the table; the cell of a run that fails says why."""
    figures: dict[str, list[float]] = {}
    cells: dict[str, str] = {}
    for name in ENGINES:
        try:
            figures[name] = train(case, name, folder, *options, timeout=timeout)
            cells[name] = f"{figures[name][len(figures[name]) // 2 - 1]:.8f}"
        except RanksFailed as failed:
            cells[name] = cause(failed)
    steps = str(max((len(each) // 2 for each in figures.values()), default=0))
    if len(figures) < len(ENGINES):
        return [case, steps, *cells.values(), "", ""]
    cells["difference"] = _shown(difference(figures["zerocore"], figures["torch"]))
    cells["resumed"] = _resumed(case, folder, options, figures, timeout)
    return [case, steps, *cells.values()]


def _resumed(
    case: str, folder: str, options: list[str], figures: dict[str, list[float]], timeout: float
) -> str:
    """The difference of the steps behind a resume, if the run had any."""
    expected = behind(figures["zerocore"])
    if not expected:
        return ""
    try:
        found = resume(case, "zerocore", folder, *options, timeout=timeout)
    except RanksFailed as failed:
        return cause(failed)
    return _shown(difference(found, expected))


def cause(failed: RanksFailed) -> str:
    """The last error that a rank raised; without one, how the first rank that failed ended."""
    lines = str(failed).splitlines()
    errors = [line for line in lines if "Error:" in line]
    ends = [
        f"rank {line.split()[2]} {end.split(';')[0]}"
        for line, end in pairwise(lines)
        if line.startswith("--- rank ")
    ]
    return errors[-1][:150] if errors else ends[0]


def _shown(found: float) -> str:
    return "none" if found == 0 else f"{found:.1e}"


def main() -> None:
    """Runs the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE", default=[])
    parser.add_argument("--option", action="append", default=[], help="of torchtitan, for all")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for a run")
    options = parser.parse_args()
    print("| case | steps | loss torch | loss zerocore | difference | resumed |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        write_assets(Path(folder))
        for case in options.cases or CASES:
            cells = row(case, folder, options.option, options.timeout)
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
