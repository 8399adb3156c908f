"""Predicts published FSDP runs and prints the error of each prediction.

python benchmarks/published.py
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Annotated, Any

import torch
import typer

import zerocore
from bench.lib.results import Results
from bench.lib.tables import Table
from zerocore.common.nodes import COMPILED_TRAFFIC, Node, find_node

GOAL_PERCENT = 15
TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "pytorch/torchtitan docs/performance.md, commit 4d88a8a"
IBM = "foundation-model-stack/fms-fsdp README.md"
NEMO = "NVIDIA NeMo AutoModel, performance summary"

# Their H100 have HBM2e at 2.4 TB/s and 500 W, and a peak that is said to be between SXM and NVL but
# is unknown: the NVL's is assumed, 835 TFLOP/s, and the same share of it for matrix products.
_SXM = find_node("8xH100-ib400")
GRAND_TETON = replace(
    _SXM,
    name="8xH100-500W-ib400",
    gpu=replace(
        _SXM.gpu,
        name="H100-500W",
        memory_nbytes=96 * 10**9,
        peak_flops=835e12,
        matmul_flops=_SXM.gpu.matmul_flops * 835 / 989,
        attention_flops=_SXM.gpu.attention_flops * 835 / 989,
        memory_bytes_per_s=2.4e12,
    ),
)
VELA = find_node("8xA100-4xeth100")  # assumes that "400Gbps" and "800Gbps" are a node's
VELA_H100 = find_node("8xH100-8xeth100")


def llama(hidden: int, inner: int, layers: int, heads: int, groups: int, vocab: int = 32000) -> Any:
    """Makes a Hugging Face configuration of a Llama."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


LLAMA2_7B = llama(4096, 11008, 32, 32, 32)
LLAMA2_13B = llama(5120, 13824, 40, 40, 40)
LLAMA_34B = llama(8192, 22016, 48, 64, 8)
LLAMA2_70B = llama(8192, 28672, 80, 64, 8)


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: the model.
        config: a preset's name, or a configuration.
        gpus: number of GPUs.
        node: the machine of 8 GPUs.
        tokens_per_s: published tokens a second of each GPU.
        source: the publication.
        seq_len, micro_batch: tokens of a sample, samples of a rank.
        recomputed: share of the forward's products that the backward computes again.
        compiled: whether torch.compile was used.
        num_replicas: replicas of hybrid sharding.
    """

    name: str
    config: Any
    gpus: int
    node: Node
    tokens_per_s: float
    source: str
    seq_len: int
    micro_batch: int
    recomputed: float = 0.0
    compiled: bool = False
    num_replicas: int = 1


# "Selective op": every second product is computed again, attention is kept. "Selective layer":
# every second block. For fms-fsdp's runs, HFU / MFU on the A100 gives the recomputed share.
RUNS = (
    Run("Llama 3.1 8B", "llama-3-8b", 8, GRAND_TETON, 5762, TITAN, 8192, 2, 0.5),
    Run("Llama 3.1 8B", "llama-3-8b", 8, GRAND_TETON, 6667, TITAN, 8192, 2, 0.5, compiled=True),
    Run("Llama 3.1 8B", "llama-3-8b", 128, GRAND_TETON, 5605, TITAN, 8192, 2, 0.5),
    Run("Llama 3.1 8B", "llama-3-8b", 128, GRAND_TETON, 6514, TITAN, 8192, 2, 0.5, compiled=True),
    Run("Llama 3 8B", "llama-3-8b", 64, find_node("A100"), 2904, TITAN_A100, 8192, 1, 0.5),
    Run("Llama 3 8B", "llama-3-8b", 64, find_node("A100"), 2973, TITAN_A100, 8192, 1, 0.5),
    Run("Llama 3 70B", "llama-3-70b", 64, find_node("A100"), 331, TITAN_A100, 8192, 1, 1.0),
    Run("Llama 2 7B", LLAMA2_7B, 128, VELA, 4550, IBM, 4096, 2, compiled=True, num_replicas=16),
    Run("Llama 2 13B", LLAMA2_13B, 128, VELA, 2150, IBM, 4096, 2, 0.4, compiled=True),
    Run("Llama 34B", LLAMA_34B, 128, VELA, 820, IBM, 4096, 2, 1.0, compiled=True),
    Run("Llama 2 70B", LLAMA2_70B, 128, VELA, 410, IBM, 4096, 2, 1.0, compiled=True),
    Run("Llama 2 7B", LLAMA2_7B, 96, VELA_H100, 9600, IBM, 4096, 2, compiled=True, num_replicas=12),
    Run("Llama 2 13B", LLAMA2_13B, 96, VELA_H100, 4850, IBM, 4096, 2, 0.4, compiled=True),
    Run("Llama 34B", LLAMA_34B, 96, VELA_H100, 1830, IBM, 4096, 2, 1.0, compiled=True),
    Run("Llama 2 70B", LLAMA2_70B, 96, VELA_H100, 890, IBM, 4096, 2, 1.0, compiled=True),
)


# Other published runs, which are not predicted.
OTHERS = (
    ("torchtitan, Llama 3.1 8B, float8", "8,532 and 8,380", "fp8 is not modelled", TITAN),
    ("torchtitan, Llama 3.1 70B, FSDP 32 x TP 8", "829", "fp8, tensor parallelism", TITAN),
    ("torchtitan, Llama 3.1 405B, FSDP 8 x TP 8 x PP 8", "128", "fp8, TP, pipeline", TITAN),
    ("NeMo AutoModel, DeepSeek-V3, 256 H100", "1,002", "pipeline, experts' exchange", NEMO),
    ("Llama 3 70B, 64 H100, FSDP2", "867", "its sequence and micro-batch were not found", "-"),
)


def predict(run: Run) -> float:
    """Predicts the tokens a second and GPU.

    Interpolates between steps without and with full checkpointing, by the recomputed share.
    """
    steps = []
    for checkpointing in (False, True):
        plan = zerocore.plan(
            run.config,
            run.gpus,
            num_replicas=run.num_replicas,
            machine=zerocore.Machine(run.node),
            mixed_precision=zerocore.MixedPrecision(torch.bfloat16),
            workload=zerocore.Workload(
                micro_batch=run.micro_batch,
                seq_len=run.seq_len,
                checkpointing=checkpointing,
                compiled=run.compiled,
            ),
        )
        steps.append(plan.stages[3].timings[0].step_s)
    plain, full = steps
    return run.micro_batch * run.seq_len / (plain + run.recomputed * (full - plain))


def errors_table(rows: list[tuple[Run, float]]) -> Table:
    """Compares published and predicted figures."""
    table = Table(
        "Tokens a second and GPU, published and predicted",
        [
            *("model", "GPUs", "machine", "tokens", "recomputed", "compiled"),
            *("published", "predicted", "error", "source"),
        ],
    )
    errors = [100 * (predicted / run.tokens_per_s - 1) for run, predicted in rows]
    for (run, predicted), error in zip(rows, errors, strict=True):
        table.add(
            run.name,
            f"{run.gpus}",
            run.node.name,
            f"{run.micro_batch} x {run.seq_len:,}",
            f"{run.recomputed:.0%}",
            "yes" if run.compiled else "no",
            f"{run.tokens_per_s:,}",
            f"{predicted:,.0f}",
            f"{error:+.1f} %",
            run.source,
        )
    table.notes = _notes(rows, errors)
    return table


def _notes(rows: list[tuple[Run, float]], errors: list[float]) -> list[str]:
    """Returns notes on the assumptions, and on runs that are not predicted."""
    nodes = dict.fromkeys(run.node for run, _ in rows)
    within = sum(abs(error) <= GOAL_PERCENT for error in errors)
    return [
        f"{within} of {len(rows)} within {GOAL_PERCENT} %; mean of the sizes "
        f"{fmean(map(abs, errors)):.1f} %. Nothing here was run: others measured the figures, a "
        "model predicts them.",
        "All rows share the same assumptions, round figures that were chosen with some of these "
        "rows in sight; none is fitted to a row.",
        "fms-fsdp runs FSDP1, the others FSDP2. Its network is assumed to be a node's; its "
        "recomputed share follows from HFU and MFU on the A100, for both GPUs, which run the same "
        "scripts (on the H100 they imply 71 and 87 % instead of 100 %). The network of "
        "torchtitan's A100 is not stated.",
        f"Under torch.compile {COMPILED_TRAFFIC:.0%} of the elementwise traffic is assumed.",
        *(f"Assumed: {node.assumptions()} ({node.gpu.source})." for node in nodes),
        *(
            f"Not predicted: {name}: {figure} ({reason}; {source})."
            for name, figure, reason, source in OTHERS
        ),
    ]


def main(
    save: Annotated[bool, typer.Option(help="Write a dated file into results/.")] = True,
) -> None:
    """Predicts each run, in half a minute on a core."""
    rows, raw = [], []
    with Results("published", save, hardware="predicted") as results:
        for run in RUNS:
            rows.append((run, predicted := predict(run)))
            names = {"config": run.name, "node": run.node.name}
            raw.append({**asdict(run), **names, "predicted": predicted})
            results.write([errors_table(rows)], {"runs": raw})


if __name__ == "__main__":
    typer.run(main)
