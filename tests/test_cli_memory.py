"""`gpubloat memory` by its command lines: exit statuses, sentences, JSON, files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from gpubloat import doctor, report
from gpubloat.cli.memory import _allocator, _size
from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators import NAMES, Caching, Driver
from gpubloat.run import Run
from tests.build import snapshot
from tests.build.snapshot import MIB
from tests.commands import Command, command
from tests.memory import fake_torch
from tests.memory.test_oom import REAL, trace
from tests.memory.test_real_traces import TRACES, needs_traces


@pytest.fixture
def gpubloat(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`gpubloat memory` with these words, in this process."""
    return command("memory", capfd, monkeypatch)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    operations = [
        ("alloc", 0, 9 * MIB, 0, "0.0"), ("alloc", 1, 2 * MIB, 0, "0.0"), ("alloc", 2, 9 * MIB, 0, "0.0"), ("free", 0),
        ("free", 2), ("alloc", 3, 12 * MIB, 0, "0.0"),
    ]  # fmt: skip
    made = snapshot.recorded(Caching(Driver(first=1 << 40)), operations)
    return snapshot.write(tmp_path / "small.pickle", made)


# replay


def test_a_replay_as_json(gpubloat: Command, small: Path) -> None:
    done = gpubloat("replay", small, "--json")
    assert done.error == ""
    answer = json.loads(done.out)
    assert answer["address_exact_frac"] == 1.0
    assert answer["allocator"] == "caching"
    assert answer["peak_reserved_bytes"] == 32 * MIB
    assert answer["peak_active_bytes"] == 20 * MIB
    assert answer["utilisation_frac"] == 20 / 32
    names = [row["allocator"] for row in answer["allocators"]]
    assert names[:4] == ["caching", "expandable", "stitching", "native"]
    assert set(names[4:]) == {"bound: live", "bound: chunks", "bound: packing"}
    assert [row["is_recorded"] for row in answer["allocators"]] == [True] + [False] * 6
    assert answer["verdict"]
    assert answer["notes"] == []


def test_the_allocator_that_is_asked_for_answers(gpubloat: Command, small: Path) -> None:
    answer = json.loads(gpubloat("replay", small, "--json", "--allocator", "native").out)
    assert (answer["allocator"], answer["peak_reserved_bytes"]) == ("native", 22 * MIB)  # 9 MiB are five pages of 2 MiB
    assert answer["address_exact_frac"] == 1.0
    assert [row["allocator"] for row in answer["allocators"]][:2] == ["caching", "native"]


@pytest.mark.parametrize("name", NAMES)
def test_every_allocator_has_a_name_on_the_command_line(gpubloat: Command, small: Path, name: str) -> None:
    answer = json.loads(gpubloat("replay", small, "--json", "--allocator", name).out)
    assert answer["allocator"] == name
    assert answer["n_oom"] == 0
    assert answer["peak_reserved_bytes"] >= answer["peak_active_bytes"] > 0


def test_settings_and_a_limit(gpubloat: Command, small: Path) -> None:
    words = ["--allocator", "caching,large_segment_size_mb=32", "--allocator", "expandable", "--limit", "21MiB"]
    answer = json.loads(gpubloat("replay", small, "--json", *words).out)
    assert answer["settings"] == "large_segment_size_mb=32"
    assert answer["n_oom"] > 0
    rows = {(row["allocator"], row["settings"]): row for row in answer["allocators"]}
    assert rows["caching", ""]["limit_bytes"] == 21 * MIB
    assert "out of memory" in answer["verdict"]


def test_the_table_of_a_replay(gpubloat: Command, small: Path, tmp_path: Path) -> None:
    done = gpubloat("replay", small, "--out", tmp_path / "run", "--csv", tmp_path / "csv")
    assert (done.status, done.error) == (0, "")
    assert "caching *" in done.out
    assert "the model put 4 of 4 allocations at their recorded address" in done.out
    assert "verdict: " in done.out
    run = Run.load(tmp_path / "run")
    assert run["replays"]["allocator"].tolist() == ["caching", "expandable", "stitching", "native"]
    assert run["verifications"]["address_exact_frac"].tolist() == [1.0]
    assert str(tmp_path) not in json.dumps(run.provenance)
    assert len(pd.read_csv(tmp_path / "csv" / "replays.csv")) == 4
    sentence, hint = gpubloat("replay", small, "--out", tmp_path / "run").refused()
    assert "is not empty" in sentence
    assert "--force" in hint
    assert gpubloat("replay", small, "--out", tmp_path / "run", "--force").status == 0


@needs_traces
def test_a_log_without_segments_has_nothing_to_be_compared_with(gpubloat: Command) -> None:
    file = TRACES / "minimalloc" / "benchmarks" / "challenging" / "A.1048576.csv"
    answer = json.loads(gpubloat("replay", file, "--json", "--allocator", "native").out)
    assert answer["address_exact_frac"] is None
    assert answer["peak_active_bytes"] >= 0


@needs_traces
def test_a_real_trace_that_begins_mid_run_says_so(gpubloat: Command) -> None:
    file = TRACES / "cs336_wedsonlin" / "medium_1024_inference_memory_snapshot.pickle"
    answer = json.loads(gpubloat("replay", file, "--json", "--allocator", "expandable").out)
    assert answer["address_exact_frac"] == 1.0
    assert any("the trace starts mid-run" in note for note in answer["notes"])
    assert answer["verdict"].startswith("expandable would reserve 0.3")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--allocator", "slab"], "no allocator 'slab'"),
        (["--allocator", "caching,max_split_size_mb"], "'max_split_size_mb' is no setting"),
        (["--allocator", "caching,colour=red"], "colour"),
        (["--limit", "much"], "'much' is no size"),
    ],
)
def test_bad_words_are_one_sentence(gpubloat: Command, small: Path, words: list[str], sentence: str) -> None:
    assert sentence in gpubloat("replay", small, *words).refused()[0]


def test_words_become_settings() -> None:
    assert _allocator("caching") == ("caching", {})
    assert _allocator("caching,max_split_size_mb=128,roundup_power2_divisions=[256:1,>:8],x=True,y=0.5") == (
        "caching",
        {"max_split_size_mb": 128, "roundup_power2_divisions": "[256:1,>:8]", "x": True, "y": 0.5},
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 << 30), ("40 GB", 40 * 10**9), ("40g", 40 * 10**9), ("1.5mib", 3 << 19), ("2000000", 2_000_000)],
)
def test_sizes(text: str, size: int) -> None:
    assert _size(text) == size
    with pytest.raises(GpubloatError):
        _size(text + "x")
    with pytest.raises(GpubloatError, match="less than one segment"):
        _size("40")


# verify


def test_verify_ends_with_1_where_addresses_differ(gpubloat: Command, small: Path, tmp_path: Path) -> None:
    assert gpubloat("verify", small).status == 0
    made = snapshot.recorded(Caching(Driver(first=1 << 40)), [("alloc", 0, MIB, 0, "0.0"), ("alloc", 1, MIB, 0, "0.0")])
    for event in made["device_traces"][0]:
        if event["action"] == "alloc":
            event["addr"] ^= MIB
    for block in made["segments"][0]["blocks"]:
        block["address"] ^= MIB
    done = gpubloat("verify", snapshot.write(tmp_path / "b.pickle", made), "--json")
    assert done.status == 1
    assert json.loads(done.out)["address_exact_frac"] < 1


def test_verify_says_what_it_did_not_predict(gpubloat: Command, small: Path) -> None:
    sample = Path(__file__).parents[1] / "data" / "samples" / "memory" / "settings.pickle.zst"
    done = gpubloat("verify", sample)
    assert (done.status, done.error) == (0, "")
    assert "it predicted 321 of 413 segment events" in done.out
    assert "note: with --limit SIZE the other 92 may be predicted, too" in done.out
    assert "garbage collection depends on it" in done.out
    right = gpubloat("verify", sample, "--limit", "1500MiB").out
    assert "it predicted 413 of 413 segment events" in right
    assert "note: " not in right
    assert json.loads(gpubloat("verify", sample, "--limit", "1500MiB", "--json").out)["notes"] == []
    (note,) = json.loads(gpubloat("verify", sample, "--limit", "3GiB", "--json").out)["notes"]
    assert note == "another limit than 3GiB may explain the other 164"
    assert "it predicted 2 of 2 segment events" in gpubloat("verify", small).out


# report


def test_the_report_of_a_snapshot(gpubloat: Command, small: Path, tmp_path: Path) -> None:
    done = gpubloat("report", small, "--csv", tmp_path / "csv", "--out", tmp_path / "run")
    assert (done.status, done.error) == (0, "")
    for words in ("every block was allocated in the trace", "memory at the end", "who pins free memory",
                  "step (train.py:7)", "reserved = held + pinned + releasable"):  # fmt: skip
        assert words in done.out
    assert len(Run.load(tmp_path / "run")["events"])
    names = {p.name for p in (tmp_path / "csv").iterdir()}
    assert {"events.csv", "report_owners.csv", "report_peaks.csv", "report_pinned.csv", "run.json"} <= names
    assert gpubloat("replay", small, "--csv", tmp_path / "csv", "--force").status == 0
    assert {p.name for p in (tmp_path / "csv").iterdir()} == {"replays.csv", "verifications.csv", "run.json"}
    again = json.loads(gpubloat("report", tmp_path / "run", "--json").out)
    pinned = again["pinned"][0]
    parts = ("held_bytes", "pinned_bytes", "releasable_bytes", "unattributed_bytes")
    assert pinned["reserved_bytes"] == sum(pinned[part] for part in parts) == 32 * MIB
    assert again["oom"] == again["lint"] == []


def test_a_snapshot_without_history_is_explained(gpubloat: Command, tmp_path: Path) -> None:
    made = snapshot.recorded(Caching(Driver(first=1 << 40)), [("alloc", 0, MIB, 0, "0.0")])
    made["device_traces"] = []
    made["allocator_settings"] |= {"expandable_segments": True, "max_split_size": 64 * MIB}
    done = gpubloat("report", snapshot.write(tmp_path / "a.pickle", made))
    assert "no events: the snapshot was taken without history" in done.out
    assert "warning: max_split_size_mb with expandable_segments" in done.out
    assert "memory at the end" in done.out
    assert "peaks" not in done.out


def test_an_oom_event_says_what_would_have_helped(gpubloat: Command, tmp_path: Path) -> None:
    file = snapshot.write(tmp_path / "a.pickle", trace(140 * MIB, 60 * MIB))
    done = gpubloat("report", file)
    assert "out of memory, GPU 0, event " in done.out
    assert "fragmentation: 60.00 MiB were asked for, 8.00 MiB were free and 116.00 MiB unused" in done.out
    assert "MB to spare" in done.out
    assert "would have failed, too" in done.out


def test_a_request_that_was_refused_asks_for_the_limit(gpubloat: Command) -> None:
    sample = Path(__file__).parents[1] / "data" / "samples" / "memory" / "oom.pickle.zst"
    without = gpubloat("report", sample).out
    assert "driver_or_limit_refused: 16.00 MiB were asked for" in without
    assert "  - if it was a limit, give it: --limit SIZE" in without
    told = gpubloat("report", sample, "--limit", "1200MiB").out
    assert "fragmentation: 16.00 MiB were asked for" in told
    assert "--limit" not in told


def test_a_pasted_message(gpubloat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    done = gpubloat("report", "--oom-message", REAL[1][1])
    assert done.out.startswith("out of memory, the message: no_allocator_can_help: 22.78 GiB were asked for")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Traceback:\n" + REAL[2][1]))
    answer = json.loads(gpubloat("report", "--oom-message", "-", "--json").out)
    assert answer["oom_message"]["verdict"] == "fragmentation"
    assert answer["oom_message"]["message"]["gpu"] == 0


def test_reports_of_nothing(gpubloat: Command, tmp_path: Path) -> None:
    assert "nothing to report on" in gpubloat("report").refused()[0]
    assert "no out-of-memory message" in gpubloat("report", "--oom-message", "hello").refused()[0]
    assert "has no tables" in gpubloat("report", "--oom-message", "x", "--csv", tmp_path / "c").refused()[0]
    assert "does not exist" in gpubloat("report", tmp_path / "none.pickle").refused()[0]
    (tmp_path / "bad.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    assert gpubloat("report", tmp_path / "bad.pickle").status == 1


# record


def test_a_command_is_recorded_and_its_status_is_ours(
    gpubloat: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(fake_torch.write(tmp_path / "site")))
    file = tmp_path / "run.pickle"
    program = "import sys, torch\ntorch.cuda.use(3)\nprint('out')\nsys.exit(7)"
    done = gpubloat("record", "--out", file, "--", sys.executable, "-c", program)
    assert done == (7, "out\n", f"wrote {file}\n")
    assert json.loads(gpubloat("report", file, "--json").out)["history"]["0"]["n_events"] == 3
    assert "exists" in gpubloat("record", "--out", file, "--", sys.executable, "-c", program).refused()[0]
    full = gpubloat("record", "--out", file, "--force", "--max-entries", 2, "--", sys.executable, "-c", program)
    assert "gpubloat: the history was full at 2 entries: it starts mid-run" in full.error
    killed = "import os, torch\ntorch.cuda.use()\nos.kill(os.getpid(), 15)"
    done = gpubloat("record", "--out", tmp_path / "k.pickle", "--", sys.executable, "-c", killed)
    assert done.status == 128 + 15
    assert "1 processes were killed before they could write their history" in done.error


@pytest.mark.parametrize(
    ("state", "found", "said"),
    [
        ("no", "libcuda.so.1 not found", "no NVIDIA GPU can be used here (libcuda.so.1 not found)"),
        ("yes", "CUDA 13.0, 1 GPUs", "python -I, -E and -S keep the recorder out"),
    ],
)
def test_nothing_recorded_is_an_error(
    gpubloat: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, found: str, said: str
) -> None:
    monkeypatch.setattr(doctor, "driver", lambda: doctor.Check("CUDA driver", state, found))
    sentence, hint = gpubloat("record", "--out", tmp_path / "a.pickle", "--", sys.executable, "-c", "pass").refused()
    assert "no Python process of the command started CUDA" in sentence
    assert said in hint
    assert "say where to keep it" in gpubloat("record", "--", sys.executable).refused()[1]
    assert "no command" in gpubloat("record", "--out", tmp_path / "a.pickle").refused()[0]


def test_a_page_about_a_snapshot_and_one_about_replays(gpubloat: Command, tmp_path: Path) -> None:
    sample = str(Path(__file__).parents[1] / "data" / "samples" / "memory" / "streams.pickle.zst")
    for verb, said in (("report", "who pins free memory"), ("replay", "what each allocator would have reserved")):
        run, page = tmp_path / verb, tmp_path / f"{verb}.html"
        assert gpubloat(verb, sample, "--out", str(run)).status == 0
        report.write(Run.load(run), page)
        assert said in page.read_text("utf-8").lower()


def test_what_pinned_at_the_peak(gpubloat: Command) -> None:
    sample = str(Path(__file__).parents[1] / "data" / "samples" / "memory" / "opt-13b-lro.pickle.zst")
    end, peak = (json.loads(gpubloat("report", sample, "--json", *more).out) for more in ([], ["--at-peak"]))
    assert (end["now"], end["peaks"], end["live"]) == (peak["now"], peak["peaks"], peak["live"])
    held = [found["pinned"][0]["held_bytes"] for found in (end, peak)]
    assert held[1] > 50 * held[0]
    assert peak["owners"][0]["place"] == "forward (memory/decoder.py:65)"


def test_a_replay_says_what_it_could_not_know(gpubloat: Command) -> None:
    samples = Path(__file__).parents[1] / "data" / "samples" / "memory"
    words = ["replay", str(samples / "settings.pickle.zst"), "--allocator", "expandable", "--json"]
    assert "the trace itself shows a peak of 1,432.4 MB" in json.loads(gpubloat(*words).out)["notes"][0]
    assert json.loads(gpubloat(*words, "--limit", "1500MiB").out)["notes"] == []
