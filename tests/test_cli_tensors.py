"""The command `gpubloat tensors`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file

from gpubloat import Run, report
from gpubloat.cli.tensors import COMPILING
from tests.commands import Command, Done, command


@pytest.fixture
def tensors(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`gpubloat tensors`; that loops are compiled is left out of what it says, since only the first test sees it."""
    run = command("tensors", capfd, monkeypatch)

    def without(*words: object) -> Done:
        done = run(*words)
        return done._replace(error=done.error.replace(f"{COMPILING}\n", ""))

    return without


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Weights in two types, counters, and an empty tensor."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, (512, 64)).astype(np.float32)
    path = tmp_path / "model.safetensors"
    save_file(
        {
            "whole": weights,
            "half": weights.astype(ml_dtypes.bfloat16),
            "cut": (weights.view(np.uint32) & 0xFFFFFF80).view(np.float32),
            "counters": rng.integers(0, 200, 1000),
            "empty": np.empty((0, 4), np.float32),
        },
        path,
    )
    return path


def test_stats_prints_savings_and_findings(tensors: Command, model: Path, tmp_path: Path) -> None:
    done = tensors("stats", model, "--csv", tmp_path / "csv", "--out", tmp_path / "run")
    assert (done.status, done.error) == (0, "")
    assert "hidden precision: cut: 16 of 23 mantissa bits are used" in done.out
    assert "counters: 8 of 64 bits are used: as uint8" in done.out
    run = Run.load(tmp_path / "run")
    assert set(run["tensors"]["tensor"]) == {"whole", "half", "cut", "counters", "empty"}
    assert len(pd.read_csv(tmp_path / "csv" / "bits.csv")) == len(run["bits"]) == 32 * 3 + 16 + 64


@pytest.mark.slow
def test_compiling_is_said_once_and_only_where_it_happens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.uint8).reshape(8, 8))
    words = [sys.executable, "-m", "gpubloat", "tensors", "stats", str(tmp_path / "a.npy"), "--json"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    first, again = (subprocess.run(words, capture_output=True, text=True, env=environment) for _ in range(2))
    assert first.stderr == f"{COMPILING}\n"
    assert again.stderr == ""
    assert first.stdout == again.stdout != ""


def test_what_packing_makes_larger_is_no_saving_below_nothing(tensors: Command, tmp_path: Path) -> None:
    file = tmp_path / "flat.npy"
    np.save(file, np.random.default_rng(0).random(1000).astype(np.float32))
    done = tensors("stats", file)
    assert done.out.count("larger") == 3  # of packing, of the paper's, and in the sentence
    assert "0.0% less; what packing makes larger counts as is" in done.out
    assert "-" not in done.out
    answer = json.loads(tensors("stats", file, "--json").out)
    assert answer["tensors"][0]["best_frac"] < -1
    packed = tensors("pack", file, "--out", tmp_path / "flat.ibp")
    assert "larger" in packed.out
    assert "% more)" in packed.out


def test_help_says_what_is_required_and_what_force_replaces(tensors: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    helped = " ".join(tensors("pack", "--help").out.split())
    assert "Write the packed tensors here (required)." in helped
    assert "Replace the file." in helped
    assert "Replace an older run in the folder; other files stay." in " ".join(tensors("stats", "--help").out.split())


def test_stats_as_json_adds_up(tensors: Command, model: Path) -> None:
    found = json.loads(tensors("stats", model, "--json").out)
    sizes = {row["tensor"]: row["raw_bytes"] for row in found["tensors"]}
    assert sizes == {"whole": 131072, "half": 65536, "cut": 131072, "counters": 8000, "empty": 0}
    assert found["total"]["raw_bytes"] == sum(sizes.values())
    saved = {row["tensor"]: row["best_frac"] for row in found["tensors"]}
    assert saved["empty"] is None
    assert saved["cut"] > 0.25
    packed = sum(size * (1 - max(saved[name] or 0, 0)) for name, size in sizes.items())
    assert found["total"]["packed_bytes"] == pytest.approx(packed, abs=1)


def test_stats_of_some_rows(tensors: Command, model: Path, tmp_path: Path) -> None:
    assert tensors("stats", model, "--max-rows", 100, "--columns", "--out", tmp_path / "run").status == 0
    run = Run.load(tmp_path / "run")
    assert set(run["tensors"].set_index("tensor").loc[["whole", "cut"], "n_rows_read"]) == {100}
    assert len(run["columns"]) == 2 * 64 * 32 + 64 * 16 + 64


@pytest.mark.parametrize("layout", ["condensed", "slots"])
@pytest.mark.parametrize("width", ["auto", "8", "16"])
def test_pack_and_unpack_give_every_byte_back(
    tensors: Command, model: Path, tmp_path: Path, layout: str, width: str
) -> None:
    packed, back = tmp_path / "m.ibp", tmp_path / "back.safetensors"
    done = tensors("pack", model, "--out", packed, "--layout", layout, "--chunk-bits", width, "--json")
    assert done.status == 0
    sizes = json.loads(done.out)
    assert sizes["raw_bytes"] == 131072 * 2 + 65536 + 8000
    if layout == "condensed":
        assert packed.stat().st_size < sizes["packed_bytes"] + 4096
    assert tensors("unpack", packed, "--out", back).status == 0
    before, after = load_file(model), load_file(back)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert (array.dtype, array.shape) == (after[name].dtype, after[name].shape)
        assert array.tobytes() == after[name].tobytes()


def test_several_files_keep_their_names_apart(tensors: Command, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.int16).reshape(3, 4))
    done = tensors("pack", model, tmp_path / "a.npy", "--out", tmp_path / "m.ibp", "--json")
    names = {row["tensor"] for row in json.loads(done.out)["tensors"]}
    assert {"model.safetensors/whole", "a.npy/a"} <= names
    done = tensors("pack", model, model, "--out", tmp_path / "n.ibp")
    assert done.refused()[0].endswith(" is there twice")
    assert not (tmp_path / "n.ibp").exists()


def test_refusals_write_nothing(tensors: Command, model: Path, tmp_path: Path) -> None:
    assert "would be lost" in tensors("pack", model).refused()[0]
    assert "'7' bits" in tensors("pack", model, "--out", tmp_path / "m.ibp", "--chunk-bits", "7").refused()[0]
    assert "layout 'odd'" in tensors("pack", model, "--out", tmp_path / "m.ibp", "--layout", "odd").refused()[0]
    assert "does not exist" in tensors("stats", tmp_path / "none.npy").refused()[0]
    assert not (tmp_path / "m.ibp").exists()
    assert tensors("pack", model, "--out", tmp_path / "m.ibp").status == 0
    content = (tmp_path / "m.ibp").read_bytes()
    assert "exists" in tensors("pack", model, "--out", tmp_path / "m.ibp").refused()[0]
    assert (
        "let it end in .safetensors" in tensors("unpack", tmp_path / "m.ibp", "--out", tmp_path / "m.bin").refused()[1]
    )
    assert (tmp_path / "m.ibp").read_bytes() == content


def test_a_damaged_file_is_not_unpacked(tensors: Command, model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "m.ibp"
    tensors("pack", model, "--out", packed)
    content = bytearray(packed.read_bytes())
    content[-5] ^= 1
    packed.write_bytes(content)
    done = tensors("unpack", packed, "--out", tmp_path / "back.safetensors")
    done.refused()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.ibp", "model.safetensors"]


def test_the_page_of_a_run_tells_savings_bits_and_findings(tensors: Command, model: Path, tmp_path: Path) -> None:
    tensors("stats", model, "--out", tmp_path / "run")
    report.write(Run.load(tmp_path / "run"), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    for title in ("What packing saves, and bounds", "elements of 16 bits", "elements of 32 bits", "Hidden precision"):
        assert title in page


def test_devices_and_inputs_are_not_replaced(tensors: Command, model: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "no ordinary file" in tensors("pack", model, "--out", pipe, "--force").refused()[0]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    before = model.read_bytes()
    assert "one of the files to pack" in tensors("pack", model, "--out", model, "--force").refused()[0]
    assert model.read_bytes() == before
    assert "both" in tensors("stats", model, "--out", tmp_path / "a", "--csv", tmp_path / "a").refused()[0]


def test_names_of_tensors_do_not_reach_the_terminal_raw(tensors: Command, tmp_path: Path) -> None:
    save_file({"\x1b[31mred\nx": np.zeros((64, 8), np.float32)}, tmp_path / "a.safetensors")
    out = tensors("stats", tmp_path / "a.safetensors").out
    assert "\x1b" not in out
    assert "hidden precision: \\x1b[31mred\\nx: all elements are zero" in out


def test_a_name_that_safetensors_keeps_for_itself_is_not_written(tensors: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", __metadata__=np.zeros((64, 8), np.float32))
    assert tensors("pack", tmp_path / "a.npz", "--out", tmp_path / "a.ibp").status == 0
    done = tensors("unpack", tmp_path / "a.ibp", "--out", tmp_path / "b.safetensors")
    assert "__metadata__" in done.refused()[0]
    assert not (tmp_path / "b.safetensors").exists()
