"""safetensors files of sharded models: read by its own library, from and to any layout."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from tests.by_night import by_night
from tests.checkpoint.saved_nets import make, train
from tests.distributed.harness import run_ranks

safetensors = pytest.importorskip("safetensors.torch")
STAGES = (0, 1, 2, 3)
TIED = "tied.weight"


def expected_of(seed: int) -> dict[str, Tensor]:
    return {key: value.contiguous() for key, value in make(None, seed).state_dict().items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype and torch.equal(actual[key], value), key


def load_both(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {key: value for file in files for key, value in safetensors.load_file(file).items()}


def save_everywhere(folder: Path) -> None:
    kept = {key: value for key, value in expected_of(0).items() if key != TIED}
    for stage in STAGES:
        model = make(stage)
        place = folder / f"{dist.get_world_size()}-{stage}"
        zerocore.save_safetensors(model, place, max_file_size="1KB" if stage % 2 else "5GB")
        assert_same(load_both(place), kept)
        with pytest.raises((FileExistsError, RuntimeError), match="is not overwritten"):
            zerocore.save_safetensors(model, place)
        assert not list(place.glob(".*"))
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        mixed = zerocore.MixedPrecision(torch.bfloat16, torch.float32, keep_fp32=("norm",))
        model = make(3, group=mesh, mixed_precision=mixed)
        zerocore.save_safetensors(model, folder / "half", dtype=torch.bfloat16)
        half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in kept.items()}
        assert_same(load_both(folder / "half"), half)


def load_everywhere(folder: Path, world_sizes: tuple[int, ...]) -> None:
    expected = dict(make(None, 0).state_dict())
    for ranks in world_sizes:
        for saved in STAGES:
            stage = (saved + ranks + dist.get_world_size()) % 4
            model = make(stage, seed=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train(model, optimizer, 1)  # what is loaded must not be hidden by what was gathered
            zerocore.load_safetensors(model, folder / f"{ranks}-{saved}")
            assert_same(zerocore.full_state_dict(model, rank0_only=False), expected)
            plain = make(None, 0).eval()
            x = torch.randn(2, 4, 3, 3)
            assert torch.allclose(model.eval()(x), plain(x), atol=1e-5)
    model = make(3, seed=1)
    zerocore.load_safetensors(model, folder / "half")
    for key, value in zerocore.full_state_dict(model, rank0_only=False).items():
        same = expected[key].bfloat16().float() if value.is_floating_point() else expected[key]
        assert torch.equal(value, same), key


# The bfloat16 files are written on four ranks.
@pytest.mark.parametrize("world_sizes", [*by_night(((1, 2, 3, 4),)), (2, 4)])
def test_any_number_of_ranks_and_stages(tmp_path: Path, world_sizes: tuple[int, ...]) -> None:
    for world_size in world_sizes:
        run_ranks(save_everywhere, world_size, tmp_path)
    index = json.loads((tmp_path / "2-1" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for world_size in world_sizes:
        run_ranks(load_everywhere, world_size, tmp_path, world_sizes)


def huggingface(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(config)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "theirs", max_shard_size="10KB")
    dist.barrier()
    torch.manual_seed(1)
    model = zerocore.shard(AutoModelForCausalLM.from_config(config), stage=3)
    zerocore.load_safetensors(model, folder / "theirs")
    assert_same(zerocore.full_state_dict(model, rank0_only=False), plain.state_dict())
    zerocore.save_safetensors(model, folder / "ours", max_file_size="10KB")
    if dist.get_rank() == 0:
        config.save_pretrained(folder / "ours")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder / "ours")
    assert_same(again.state_dict(), plain.state_dict())
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_huggingface_models_in_both_directions(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(huggingface, 2, tmp_path)


def broken_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Folders that do not fit, and what the error must say of each."""
    values = {key: value for key, value in expected_of(0).items() if key != TIED}
    cases: dict[str, dict[str, Tensor]] = {
        r"missing \['scale'\]": {key: v for key, v in values.items() if key != "scale"},
        r"unexpected \['more'\]": {**values, "more": torch.zeros(2)},
        r"model\.safetensors: 'cube' has shape \(2,\)": {**values, "cube": torch.zeros(2)},
        r"model\.safetensors: 'head\.bias' is torch\.complex64": {
            **values,
            "head.bias": values["head.bias"].to(torch.complex64),
        },
        r"model\.safetensors: 'norm\.num_batches_tracked' is torch\.float32": {
            **values,
            "norm.num_batches_tracked": torch.zeros(()),
        },
        "truncated": values,
        "cannot be read as safetensors": values,
    }
    found = {}
    for number, (message, tensors) in enumerate(cases.items()):
        place = folder / str(number)
        if dist.get_rank() == 0:
            place.mkdir()
            file = place / "model.safetensors"
            safetensors.save_file(tensors, file)
            if message == "truncated":
                file.write_bytes(file.read_bytes()[:-4])
            if message == "cannot be read as safetensors":
                file.write_bytes(file.read_bytes()[:8] + b"?" * 4000)
        found[message] = (place, message)
    dist.barrier()
    return found


def refuse(folder: Path) -> None:
    model = make(3)
    before = zerocore.full_state_dict(model, rank0_only=False)
    for place, message in broken_files(folder).values():
        with pytest.raises((ValueError, RuntimeError), match=message):
            zerocore.load_safetensors(model, place)
    own = folder / ("none" if dist.get_rank() else "0")  # one rank sees no files
    with pytest.raises((FileNotFoundError, RuntimeError, ValueError), match="no safetensors files"):
        zerocore.load_safetensors(model, own, strict=False)
    assert_same(zerocore.full_state_dict(model, rank0_only=False), before)
    zerocore.load_safetensors(model, folder / "1", strict=False)
    zerocore.load_safetensors(
        model, folder / "1", rename=lambda name: None if name == "more" else name
    )
    with pytest.raises(
        (ValueError, RuntimeError), match=r"missing \['cube'\].*\['cubus', 'more'\]"
    ):
        zerocore.load_safetensors(model, folder / "1", rename={"cube": "cubus"})


def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(refuse, 2, tmp_path)


def fail_to_flush(folder: Path) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "fsync", fail)
        with pytest.raises((OSError, RuntimeError), match=os.strerror(errno.EIO)):
            zerocore.save_safetensors(make(3), folder)
    assert not list(folder.glob("*.safetensors"))


def test_a_file_that_a_rank_cannot_flush_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(fail_to_flush, 2, tmp_path)


def flip_bits(folder: Path) -> None:
    model = make(3)
    zerocore.save_safetensors(model, folder, max_file_size="1KB")
    paths = sorted(folder.iterdir())  # files of tensors, the index, the list of checksums
    other = make(3, 1)
    before = zerocore.full_state_dict(other, rank0_only=False)
    choose = random.Random(5)
    for index in range(200):
        path = paths[index % len(paths)]
        good = path.read_bytes()
        data = bytearray(good)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(bytes(data))
        dist.barrier()
        with pytest.raises((ValueError, RuntimeError), match=path.name):
            zerocore.load_safetensors(other, folder)
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(good)
        dist.barrier()
    assert_same(zerocore.full_state_dict(other, rank0_only=False), before)
    zerocore.load_safetensors(other, folder)


@pytest.mark.nightly
def test_flipped_bits_are_all_found(tmp_path: Path) -> None:
    run_ranks(flip_bits, 2, tmp_path, timeout=120.0)
