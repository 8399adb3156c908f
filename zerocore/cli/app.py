"""The commands plan, describe, env and bench; checkpoint has a file of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import zerocore
from zerocore.checkpoint.commands import app as checkpoint_commands
from zerocore.cli.environment import environment
from zerocore.common.links import PRESETS
from zerocore.common.nodes import MACHINES
from zerocore.common.tables import print_table
from zerocore.model.units import choose_units
from zerocore.options.config import ACCUMULATE_MODES, Communication
from zerocore.options.precision import MixedPrecision
from zerocore.planning.division import Division
from zerocore.planning.huggingface import build_model, config_dtype, load_config, preset_names
from zerocore.planning.planner import OPTIMIZER_STATES, make_planner
from zerocore.planning.setting import Machine, Workload
from zerocore.reporting.description import describe_plan

app = typer.Typer(
    help="ZeRO for PyTorch: plan a run before it is started, inspect models and installations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
BENCHMARKS = Path(zerocore.__file__).resolve().parents[1] / "benchmarks"
app.add_typer(checkpoint_commands, name="checkpoint")
STDERR = 2  # the file descriptor


class DType(str, Enum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class ByteType(str, Enum):
    FP8 = "fp8"
    INT8 = "int8"


_TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    ByteType.FP8: torch.float8_e4m3fn,
    ByteType.INT8: torch.int8,
}


_Config = Annotated[
    str | None,
    typer.Option(help="Hugging Face configuration: a JSON file, or a folder with config.json."),
]
_Preset = Annotated[
    str | None, typer.Option(help=f"Shipped configuration: {', '.join(preset_names())}.")
]
_Gpus = Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")]
_DType = Annotated[
    DType | None, typer.Option(help="Dtype of the model; the configuration's by default.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON; sizes are bytes.")]


# Flags of `plan` that are fields, with their help. Defaults are the fields' own.
_FLAGS: dict[type, dict[str, str]] = {
    Communication: {
        "prefetch": "Units gathered ahead.",
        "accumulate": ", ".join(ACCUMULATE_MODES),
        "replicas_share": "optimizer: its states are sharded over replicas, too.",
    },
    MixedPrecision: {
        "reduce_dtype": "Dtype of gradients, with --mixed-precision.",
        "wire_dtype": "Dtype of gradients on the wire, which ranks add exactly.",
        "gather_dtype": "One-byte dtype in which parameters are gathered, at stage 3.",
    },
    Workload: {
        "micro_batch": "Samples in a forward.",
        "micro_batches": "Forwards in a step.",
        "seq_len": "Tokens in a sample.",
        "optimizer": ", ".join(OPTIMIZER_STATES),
        "checkpointing": "Recompute each block in the backward.",
        "compiled": "torch.compile fuses elementwise kernels; with --machine.",
        "zero_bubble": "The model is a stage of a pipeline without bubbles.",
        "rank": "The rank to plan; rank 0 owns the most.",
    },
    Machine: {
        "memory": "Memory of a GPU, such as 80GB; by default --machine's, else 24GiB.",
        "replica_link": "Link between replicas; by default --link.",
        "near_link": "Link between GPUs of --regather; by default --link.",
        "flops": "Operations a second that layers reach, instead of --machine's.",
        "host_memory": "Memory of a host, such as 512GiB; the plan then lists offloads that fit.",
        "host_bandwidth": "Bytes that the host reads and writes in a second, such as 400GB/s.",
    },
}

_KINDS: dict[str, Any] = {"reduce_dtype": DType, "wire_dtype": DType, "gather_dtype": ByteType}


def _takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of :data:`_FLAGS`."""
    parameters = signature(command, eval_str=True).parameters.values()
    params = [param for param in parameters if param.kind is not Parameter.VAR_KEYWORD]
    for kind, texts in _FLAGS.items():
        for name, text in texts.items():
            default = getattr(kind, name)
            option: Any = typer.Option(default, help=text)
            taken = _KINDS.get(name, str) | None if default is None else type(default)
            params.append(Parameter(name, Parameter.KEYWORD_ONLY, default=option, annotation=taken))
    command.__signature__ = Signature(params)  # type: ignore[attr-defined]
    return command


def _of_flags(kind: Any, flags: Mapping[str, Any], **fixed: Any) -> Any:
    return kind(**{name: flags[name] for name in _FLAGS[kind]}, **fixed)


@app.command()
@_takes_flags
def plan(
    hf_config: _Config = None,
    preset: _Preset = None,
    gpus: _Gpus = 8,
    num_replicas: Annotated[
        int, typer.Option(min=1, help="Replicas of the model: hybrid sharding.")
    ] = 1,
    regather: Annotated[
        int, typer.Option(min=1, help="GPUs that gather from each other again, at stage 3.")
    ] = 1,
    group: Annotated[
        list[str] | None,
        typer.Option(
            help="Parameters that fewer GPUs share: 'experts=edp:2,ep:4' is 4 parts, each on 2."
        ),
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help=f"GPUs of a node and its network: {', '.join(MACHINES)}.")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(PRESETS)}, or a link like 450GB/s,12us; repeatable."),
    ] = None,
    dtype: _DType = None,
    mixed_precision: Annotated[
        DType | None, typer.Option(help="Compute in this dtype, keep fp32 main weights.")
    ] = None,
    as_json: _Json = False,
    **flags: Any,
) -> None:
    """Plan each stage's memory and time and recommend one; needs no GPU."""
    with _errors():
        result = zerocore.plan(
            _source(hf_config, preset),
            gpus,
            num_replicas=num_replicas,
            groups=_groups(group or []),
            communication=_of_flags(Communication, flags, regather=regather),
            workload=_of_flags(Workload, flags),
            machine=_of_flags(Machine, flags, node=machine, links=link),
            dtype=_torch_dtype(dtype),
            mixed_precision=_mixed(mixed_precision, flags),
        )
    if as_json:
        _print_json(result.to_dict())
    else:
        print_table(result.title(), result.rows(), result.notes())


def _mixed(param: DType | None, flags: Mapping[str, Any]) -> MixedPrecision | None:
    if flags["reduce_dtype"] is not None and param is None:
        raise ValueError("--reduce-dtype needs --mixed-precision; give both")
    dtypes: dict[str, Any] = {name: _torch_dtype(flags[name]) for name in _FLAGS[MixedPrecision]}
    dtypes["param_dtype"] = _torch_dtype(param)
    return MixedPrecision(**dtypes) if any(dtypes.values()) else None


def _groups(texts: list[str]) -> dict[str, zerocore.ParameterMesh]:
    """Parses ``experts=edp:2,ep:4``: a name or pattern, the ranks that share, and the parts."""
    groups = {}
    for text in texts:
        match = re.fullmatch(r"([^=]+)=\w+:(\d+)(?:,\w+:(\d+))?", text)
        if match is None:
            raise ValueError(f"--group: expected text like 'experts=edp:2,ep:4', got '{text}'")
        name, num_ranks, num_parts = match.groups()
        pattern = name if "*" in name else f"*.{name}.*"
        groups[pattern] = zerocore.ParameterMesh(int(num_ranks), of=int(num_parts or 1))
    return groups


@app.command()
def describe(
    hf_config: _Config = None,
    preset: _Preset = None,
    gpus: _Gpus = 8,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    dtype: _DType = None,
    as_json: _Json = False,
) -> None:
    """List the units by which a model is sharded: bytes, shards, padding, regions."""
    with _errors():
        source = _source(hf_config, preset)
        config = load_config(source)
        model = build_model(config, _torch_dtype(dtype) or config_dtype(config), source)
        planner = make_planner(model, choose_units(model, None))
        description = describe_plan(type(model).__name__, planner, Division(stage, gpus))
    if as_json:
        _print_json(asdict(description))
    else:
        print_table(description.title(), description.rows())


@app.command()
def env(as_json: _Json = False) -> None:
    """Print versions and devices for a bug report."""
    facts = environment()
    if as_json:
        _print_json(facts)
    else:
        for name, fact in facts.items():
            typer.echo(f"{name}: {fact}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # --help after NAME goes to the script
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="overlap, memory, step, kernels, ...")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results file; the script's output is stderr.")
    ] = False,
) -> None:
    """Run benchmarks/NAME.py of a checkout; arguments after NAME go to it, --help too."""
    if name == "--help":
        typer.echo(context.get_help())
        return
    with _errors():
        scripts = sorted(
            path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.startswith("_")
        )
        if not scripts:
            raise ValueError(
                "there is no benchmarks folder: the benchmarks are in zerocore's repository, not "
                "in the installed package; run this from a checkout"
            )
        if name not in scripts:
            raise ValueError(f"there is no benchmark '{name}'; choose one of {', '.join(scripts)}")
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *context.args]
    before = _results()
    done = subprocess.run(command, check=False, stdout=STDERR if as_json else None)
    if done.returncode != 0:
        raise typer.Exit(done.returncode)
    if as_json:
        with _errors():
            _print_results(name, before)


def _results_folder() -> Path:
    """Returns the folder that benchmarks write to; they find it in the same way."""
    return Path(os.environ.get("ZEROCORE_RESULTS", BENCHMARKS / "results"))


def _results() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in _results_folder().glob("*.json")}


def _print_results(name: str, before: dict[Path, int]) -> None:
    """Prints the results that are newer than ``before``, but no traces and other files."""
    written = [path for path, time_ns in _results().items() if before.get(path) != time_ns]
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(written)]
    results = [content for content in contents if isinstance(content, dict) and "theme" in content]
    if not results:
        raise ValueError(
            f"benchmark '{name}' wrote no results to {_results_folder()}; leave out options such "
            "as --out, and choose the folder with the environment variable ZEROCORE_RESULTS"
        )
    for result in results:
        _print_json(result)


@contextmanager
def _errors() -> Iterator[None]:
    """Turns a user's mistake into one message and exit code 2, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, ImportError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _source(hf_config: str | None, preset: str | None) -> str:
    if (hf_config is None) == (preset is None):
        raise ValueError("give either --hf-config or --preset")
    if preset is not None and preset.lower() not in preset_names():
        raise ValueError(f"preset must be one of {', '.join(preset_names())}, got '{preset}'")
    return preset or str(hf_config)


def _torch_dtype(dtype: DType | ByteType | None) -> torch.dtype | None:
    return None if dtype is None else _TORCH_DTYPES[dtype]


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
