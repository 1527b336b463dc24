"""PyTorch's files and tensors, as PyTorch itself reads and writes them. Skipped where it is not installed."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.tensors.sources import as_tensor, tensors_in

torch = pytest.importorskip("torch")


def states() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "plain": base,
        "turned": base.T,
        "part": base[1:, 2:5],
        "steps": base[::2, ::3],
        "row": base[2],
        "number": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "narrow": torch.empty(3, 0),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        **{
            str(kind).removeprefix("torch."): torch.arange(12).reshape(3, 4).to(kind)
            for kind in (
                torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
                torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
                torch.uint64, torch.bool,
            )
        },
    }  # fmt: skip


def content(x: Any) -> bytes:
    dense = x.detach().contiguous()
    return bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes()) if dense.numel() else b""


def test_tensors_as_pytorch_loads_them(tmp_path: Path) -> None:
    state = states()
    for protocol in (2, 3, 4, 5):
        torch.save(state, tmp_path / "m.pt", pickle_protocol=protocol)
        found = {t.name: t for t in tensors_in(tmp_path / "m.pt")}
        loaded = torch.load(tmp_path / "m.pt", weights_only=protocol == 2)
        assert list(found) == list(loaded)
        for name, x in loaded.items():
            assert found[name].words.tobytes() == content(x), name
            assert found[name].shape == tuple(x.shape)
            assert found[name].dtype == as_tensor(x).dtype


def test_arrays_of_pytorch_in_memory() -> None:
    for name, x in states().items():
        tensor = as_tensor(x.requires_grad_() if x.is_floating_point() and x.is_leaf else x, name)
        assert tensor.words.tobytes() == content(x), name
        assert tensor.shape == tuple(x.shape)
        assert tensor.words.flags.c_contiguous
    x = torch.arange(4.0)
    assert np.shares_memory(as_tensor(x).words, x.numpy())
    negative = torch.tensor([1 + 2j]).conj().imag  # a negative that is not worked out
    assert negative.is_neg()
    assert as_tensor(negative).words.view("f4").tolist() == [-2.0]


def test_arrays_of_pytorch_that_have_no_rows_are_refused() -> None:
    for x in (
        torch.zeros(2, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.empty(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ):  # fmt: skip
        with pytest.raises(GpubloatError) as caught:
            as_tensor(x, "weights")
        assert "weights" in str(caught.value)


def test_models_and_optimizers_as_pytorch_saves_them(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LSTM(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model[1](model[0](torch.randn(5, 3))).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "size": torch.Size([1, 2]), "epoch": 3,
         "device": torch.device("cpu"), "loss": 0.5, "type": torch.float32, "names": {"a", "b"}},
        tmp_path / "m.pth",
    )  # fmt: skip
    found = {t.name: t for t in tensors_in(tmp_path / "m.pth")}
    for name, x in model.state_dict().items():
        assert found[f"model.{name}"].words.tobytes() == content(x)
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert found["optimizer.state.0.exp_avg"].words.tobytes() == content(moments)


def test_what_pytorch_keeps_in_other_ways_is_refused(tmp_path: Path) -> None:
    negative = torch.tensor([1 + 2j]).conj().imag
    for x in (
        torch.nn.Linear(2, 2), torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex64), negative,
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), torch.ones(1).expand(5),
    ):  # fmt: skip
        torch.save({"a": x}, tmp_path / "m.pt")
        with pytest.raises(FormatError):
            tensors_in(tmp_path / "m.pt")
    torch.save(OrderedDict(a=torch.ones(3)), tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"before 1\.6"):
        tensors_in(os.fspath(tmp_path / "m.pt"))
