"""Files that somebody else made: what was saved, or an error that names the file."""

from __future__ import annotations

import json
import os
import pickle
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as saved
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo

import zerocore
from tests.checkpoint import mutants
from tests.checkpoint.fuzz import run_mutants
from zerocore.checkpoint.convert import open_weights
from zerocore.checkpoint.dcp.contents import Contents
from zerocore.checkpoint.dcp.safe_reader import locate
from zerocore.checkpoint.safetensors.files import read_folder, read_header

Model = tuple[nn.Module, zerocore.Checkpoints, Path]


@pytest.fixture
def made(tmp_path: Path) -> Model:
    """A model, its checkpoints, and the folder of the first one."""
    model = zerocore.shard(nn.Sequential(nn.Linear(6, 5)))
    checkpoints = zerocore.Checkpoints(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints.save(1).wait()
    return model, checkpoints, tmp_path / "step-00000001"


def test_mutants(tmp_path: Path) -> None:
    found = run_mutants(250, 0, tmp_path)
    assert found["FAILED"] == 0 and found["an error"] > 150, found


def forge(folder: Path, change: Callable[[Any], None]) -> None:
    """Changes the metadata, and signs them."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    mutants.sign_folder(folder, ".metadata")


@pytest.mark.parametrize(
    ("strides", "is_known"),
    [
        ([], True),
        ([None], True),
        ([(5, 1)], True),
        ([("5",)], False),
        ([[5]], False),
        ([(), ()], False),
    ],
)
def test_properties_of_other_releases(
    strides: list[Any], is_known: bool, made: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 adds a tensor's strides to its properties, whichever release reads them."""
    model, checkpoints, folder = made
    expected = zerocore.full_state_dict(model)
    fields_of = saved.TensorProperties.__getstate__

    def written(properties: saved.TensorProperties) -> tuple[Any, ...]:
        return (*fields_of(properties)[:5], *strides)

    with monkeypatch.context() as patched:
        patched.setattr(saved.TensorProperties, "__getstate__", written)
        forge(folder, lambda metadata: None)
    if not is_known:
        with pytest.raises(ValueError, match=r"\.metadata cannot be read: a tensor's properties"):
            checkpoints.load()
        return
    with torch.no_grad():
        model[0].weight.zero_()
    assert checkpoints.load() == 1
    for name, value in zerocore.full_state_dict(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("attribute", "is_known"),
    [
        (lambda format: (type(format), format.name), True),
        (lambda format: (type(format), "__class__"), False),
        (lambda format: (torch.strided, format.name), False),
        (lambda format: (format.name, "join"), False),
    ],
)
def test_formats_of_other_pythons(
    attribute: Callable[[Any], Any], is_known: bool, made: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as an attribute of it."""
    _, checkpoints, folder = made
    kind: Any = saved._MEM_FORMAT_ENCODING
    with monkeypatch.context() as patched:
        patched.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, attribute(self)))
        forge(folder, lambda metadata: None)
    if is_known:
        assert checkpoints.load() == 1
        return
    with pytest.raises(
        ValueError, match=r"\.metadata cannot be read: no checkpoint needs the attr"
    ):
        checkpoints.load()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/dev/zero", "..", "pipe", "a\x1b[31m"])
def test_names_lead_nowhere_else(path: str, made: Model) -> None:
    model, checkpoints, folder = made
    before = zerocore.full_state_dict(model)
    other = folder.parent / "other"
    other.mkdir()
    (other / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    os.mkfifo(folder / "pipe")

    def lead(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    forge(folder, lead)
    for load in (checkpoints.load, lambda: open_weights(folder)):
        with pytest.raises(ValueError, match=r"step-00000001/(\.metadata|pipe)") as caught:
            load()
        assert str(caught.value).isprintable()
    assert all(torch.equal(v, before[k]) for k, v in zerocore.full_state_dict(model).items())


class Evil:
    """Pickles as ``make()`` says."""

    def __init__(self, *made: Any) -> None:
        self._made = made

    def __reduce__(self) -> Any:
        return self._made


def test_no_class_is_changed_or_called(made: Model) -> None:
    _, checkpoints, folder = made
    index, size = saved.MetadataIndex, torch.Size
    marks = [  # what Python's unpickler would set for the whole process
        b"\x80\x04c%s\n%s\nN}\x8c\x04evilK\x01s\x86b." % (kind.__module__.encode(), name)
        for kind, name in (
            (index, b"MetadataIndex"),
            (saved.Metadata, b"Metadata"),
            (size, b"Size"),
        )
    ]
    calls = [pickle.dumps(Evil(os.mkdir, (str(folder / "evil"),))), pickle.dumps(os.system)]
    for data in [*marks, *calls, *mutants._tricks()]:
        (folder / ".metadata").write_bytes(data)
        mutants.sign_folder(folder, ".metadata")
        began = time.process_time()
        with pytest.raises(ValueError, match=r"step-00000001/\.metadata"):
            checkpoints.load()
        assert time.process_time() - began < 2
    assert not (folder / "evil").exists()
    assert not any(hasattr(kind, "evil") for kind in (index, saved.Metadata, size))


def test_a_storage_of_nested_tuples_is_never_hashed(tmp_path: Path) -> None:
    """A chunk of DCP whose pickle names a storage by tuples in tuples, or of 2**60 leaves."""
    deep = b")" + b"\x85" * 200_000
    wide = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60
    torch.save(torch.zeros(4), tmp_path / "good")
    for nested in (deep, wide):
        with (
            zipfile.ZipFile(tmp_path / "good") as good,
            zipfile.ZipFile(tmp_path / "forged", "w") as forged,
        ):
            for name in good.namelist():
                pickled = b"\x80\x02N" + nested + b"\x86Q."
                forged.writestr(name, pickled if name.endswith(".pkl") else good.read(name))
        with open(tmp_path / "forged", "rb") as file:
            assert locate(file.fileno(), 0, os.path.getsize(file.name)) is None


def test_pieces_are_all_of_a_tensor(made: Model) -> None:
    _, checkpoints, folder = made
    good = (folder / ".metadata").read_bytes()

    def shrink(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["model.0.weight"].chunks[0]
        chunk.sizes = torch.Size((4, 6))

    def double(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.0.weight"].chunks
        halves = [(0, 0), (1, 0)]  # of 3 rows each, of 5
        chunks[:] = [
            saved.ChunkStorageMetadata(torch.Size(at), torch.Size((3, 5))) for at in halves
        ]
        info = _StorageInfo("__0_0.distcp", 0, 2000)
        for at in halves:
            metadata.storage_data[saved.MetadataIndex("model.0.weight", torch.Size(at))] = info

    def miss(metadata: Any) -> None:
        metadata.storage_data.popitem()

    def grow(metadata: Any) -> None:
        metadata.state_dict_metadata["model.0.weight"].size = torch.Size((1 << 40, 6))

    def count(metadata: Any) -> None:
        key = next(k for k, v in metadata.planner_data.items() if "param_groups" in v)
        metadata.planner_data[key] = ("optim", "param_groups", 1 << 40, "lr")

    def lack(metadata: Any) -> None:
        del next(iter(metadata.storage_data.values())).__dict__["offset"]

    for change in (shrink, double, miss, grow, count, lack):
        (folder / ".metadata").write_bytes(good)
        forge(folder, change)
        with pytest.raises(ValueError, match="step-00000001"):
            checkpoints.load()
    (folder / ".metadata").write_bytes(good)
    mutants.sign_folder(folder, ".metadata")
    assert checkpoints.load() == 1 and len(Contents(folder).files) == 2


def test_links_are_followed_as_in_caches(made: Model, tmp_path: Path) -> None:
    model, checkpoints, folder = made
    zerocore.save_safetensors(model, tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to("../blobs/model.safetensors")
    zerocore.load_safetensors(model, tmp_path / "snapshot")
    (folder / "__0_0.distcp").rename(tmp_path / "blob")
    (folder / "__0_0.distcp").symlink_to("../blob")
    assert checkpoints.load() == 1
    link.unlink()
    link.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a regular file"):
        zerocore.load_safetensors(model, tmp_path / "snapshot")


def test_an_index_leads_nowhere_else(made: Model, tmp_path: Path) -> None:
    model, _, _ = made
    zerocore.save_safetensors(model, tmp_path / "other")
    zerocore.save_safetensors(model, tmp_path / "hf", max_file_size=40)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    for file in ("../other/model.safetensors", str(tmp_path / "other" / "model.safetensors"), 7):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(good, file)}))
        mutants.sign_folder(tmp_path / "hf", index.name)
        with pytest.raises(
            ValueError, match=r"index\.json is not an index.*not the name of a file"
        ):
            zerocore.load_safetensors(model, tmp_path / "hf")


def official(blob: bytes) -> Any:
    """The tensors that the format's own reader finds in a file; None if it refuses it."""
    safetensors = pytest.importorskip("safetensors")
    try:
        return {name: (x["dtype"], x["shape"]) for name, x in safetensors.deserialize(blob)}
    except safetensors.SafetensorError:
        return None


def header_file(text: bytes, nbytes: int = 32) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def test_headers_as_their_own_reader_takes_them(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "b": {"dtype": "BF16", "shape": [8], "data_offsets": [16, 32]},
            "none": {"dtype": "I64", "shape": [0, 3], "data_offsets": [16, 16]},
        }
    ).encode()
    path, choose, taken = tmp_path / "model.safetensors", random.Random(2), 0
    # Files that it takes and that are refused here: no program has saved them.
    stricter = (
        "occurs twice",
        "other fields than",
        "the unknown dtype",
        "its metadata must be",
        "'-",
    )
    for _ in range(1200):
        blob = mutants.header_changed(header_file(text), choose)
        path.write_bytes(blob)
        theirs = official(blob)
        try:
            ours = read_header(path)
        except ValueError as error:
            assert str(path) in str(error) and len(str(error)) < 1000
            assert theirs is None or any(why in str(error) for why in stricter), (error, blob)
        else:
            assert theirs is not None, blob
            assert {n: list(e.shape) for n, e in ours.items()} == {
                n: s for n, (_, s) in theirs.items()
            }
            taken += 1
    assert taken > 20


def test_a_shape_of_many_dimensions_takes_no_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for size in (1, 9_999_999):
        sizes = [size] * 300_000
        facts = {"dtype": "F32", "shape": sizes, "data_offsets": [0, 16]}
        path.write_bytes(header_file(json.dumps({"a": facts}).encode(), 16))
        began = time.process_time()
        with pytest.raises(ValueError, match=r"model\.safetensors.*300000") as caught:
            read_folder(tmp_path)
        assert time.process_time() - began < 2 and len(str(caught.value)) < 1000
