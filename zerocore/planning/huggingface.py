"""Builds models from Hugging Face configurations or presets, without weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerocore.common.extras import missing


def preset_names() -> list[str]:
    """Returns the names of the configurations that ship with the package."""
    folder = resources.files("zerocore.planning") / "presets"
    return sorted(
        entry.name.removesuffix(".json")
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )


def load_config(source: str | Path | dict[str, Any]) -> Any:
    """Loads a Hugging Face configuration from a preset's name, a JSON file or its content.

    Raises:
        ImportError: transformers is not installed.
        ValueError: ``source`` is neither a preset nor a file, or is not a configuration that
            transformers accepts.
    """
    values = source if isinstance(source, dict) else _read(str(source))
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{_name(source)}: a configuration needs a 'model_type', found none")
    transformers = _import_transformers()
    if values["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{_name(source)}: transformers {transformers.__version__} has no model_type "
            f"'{values['model_type']}'"
        )
    with _naming(source):
        return transformers.AutoConfig.for_model(**values)


def build_model(config: Any, dtype: torch.dtype | None = None, source: object = None) -> nn.Module:
    """Builds a configuration's model on the meta device, in training mode.

    Its class is the first of ``config.architectures``, or the type's causal language model.

    Args:
        config: a Hugging Face configuration.
        dtype: floating-point dtype of the parameters; None takes torch's default.
        source: where the configuration was loaded from, for errors.

    Raises:
        ValueError: transformers has no such class, or cannot build it from these values.
    """
    make = _model_maker(config, source)
    options = {"dtype": dtype} if dtype is not None else {}
    with _naming(source), torch.device("meta"):
        model = make(config, **options)
    return model.train()


def sample_inputs(model: nn.Module, micro_batch: int, seq_len: int) -> dict[str, Any] | None:
    """Makes the keyword arguments of a Hugging Face model's training forward, on the meta device.

    A sample has ``seq_len`` tokens, or as many as the configuration allows. Returns None for a
    model whose inputs are unknown.
    """
    config, main_input = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None:
        return None
    if main_input == "input_ids":
        length = min(seq_len, getattr(config, "max_position_embeddings", None) or seq_len)
        tokens = torch.zeros(micro_batch, length, dtype=torch.long, device="meta")
        inputs: dict[str, Any] = {"input_ids": tokens}
        if hasattr(config, "use_cache"):
            inputs["use_cache"] = False
        if type(model).__name__.endswith(("LM", "LMHeadModel", "ConditionalGeneration")):
            inputs["labels"] = tokens
        return inputs
    if main_input == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, tuple | list) else (size, size)
        shape = (micro_batch, config.num_channels, height, width)
        return {"pixel_values": torch.zeros(shape, device="meta")}
    return None


def config_dtype(config: Any) -> torch.dtype | None:
    """Returns the dtype of a configuration; None if it names none."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _model_maker(config: Any, source: object) -> Callable[..., nn.Module]:
    transformers = _import_transformers()
    names = getattr(config, "architectures", None)
    if not names:
        return transformers.AutoModelForCausalLM.from_config
    name = names[0] if isinstance(names, list | tuple) else names
    make = getattr(getattr(transformers, str(name), None), "_from_config", None)
    if make is None:
        version = transformers.__version__
        raise ValueError(f"{_name(source)}: transformers {version} has no model class '{name}'")
    return make


@contextmanager
def _naming(source: object) -> Iterator[None]:
    """Turns transformers' errors about a configuration into a ValueError that names its source."""
    try:
        yield
    except ImportError:  # the model needs a library that is not installed
        raise
    except Exception as error:  # transformers raises errors of many classes
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{_name(source)}: transformers cannot use this configuration: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _read(source: str) -> Any:
    preset = resources.files("zerocore.planning") / "presets" / f"{source.lower()}.json"
    path = Path(source)
    if "/" not in source and preset.is_file():
        return json.loads(preset.read_text(encoding="utf-8"))
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"'{source}' is a folder without a config.json")
    if not path.is_file():
        raise ValueError(
            f"'{source}' is neither a file nor a preset; presets: {', '.join(preset_names())}"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # the text is not JSON or not UTF-8
        raise ValueError(f"'{source}' is not JSON: {error}") from None


def _name(source: object) -> str:
    return f"'{source}'" if isinstance(source, str | Path) else "the configuration"


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise missing("transformers", "hf", "models from Hugging Face configurations") from None
    return transformers
