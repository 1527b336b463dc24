"""Messages that people posted, as PyTorch 1.x to 2.13 wrote them, and what they mean."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat import memory
from gpubloat.errors import GpubloatError
from gpubloat.memory import oom, oomtrace
from gpubloat.memory.allocators import Caching, Driver
from gpubloat.memory.oom import diagnose, parse
from tests.build import snapshot

GIB, MIB = 1 << 30, 1 << 20
TAIL = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
    " fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html)"
)
OLD_TAIL = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See"
    " documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
# (where it was posted, the message, the verdict, some of its numbers in bytes)
REAL = [
    (
        "pytorch/pytorch #152135",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of"
        " 79.26 GiB"
        " of which 104.75 MiB is free. Process 1007710 has 79.14 GiB memory in use. Of the allocated memory 74.77"
        " GiB is"
        " allocated by PyTorch, and 3.87 GiB is reserved by PyTorch but unallocated." + TAIL,
        "fragmentation",
        {"request_bytes": 250 * MIB, "process_bytes": round(79.14 * GIB), "other_processes_bytes": None},
    ),
    (
        "murong-xu/CADS #4",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total capacity of"
        " 31.47 GiB of"
        " which 12.73 GiB is free. Including non-PyTorch memory, this process has 18.73 GiB memory in use. Of the"
        " allocated"
        " memory 9.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated." + TAIL,
        "no_allocator_can_help",
        {"free_bytes": round(12.73 * GIB), "unallocated_bytes": round(9.35 * GIB), "process_bytes": round(18.73 * GIB)},
    ),
    (
        "Tianhao-Qi/Mask2DiT #4",
        "CUDA out of memory. Tried to allocate 35.60 GiB. GPU 0 has a total capacity of 79.33 GiB of which 26.16"
        " GiB is free."
        " Process 76883 has 53.16 GiB memory in use. Of the allocated memory 11.97 GiB is allocated by PyTorch,"
        " and 40.69 GiB"
        " is reserved by PyTorch but unallocated." + TAIL,
        "fragmentation",
        {"capacity_bytes": round(79.33 * GIB), "reserved_bytes": round(11.97 * GIB) + round(40.69 * GIB)},
    ),
    (
        "zju3dv/Diffuman4D #20 (numbers)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 960.00 MiB. GPU 0 has a total capacity of"
        " 23.99 GiB of"
        " which 15.52 GiB is free. Of the allocated memory 6.26 GiB is allocated by PyTorch, and 76.00 MiB is"
        " reserved by"
        " PyTorch but unallocated." + TAIL,
        "driver_or_limit_refused",
        {},
    ),
    (
        "huggingface/meshgen #7: allocated beyond the capacity, on Windows",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of"
        " 8.00 GiB of"
        " which 0 bytes is free. Of the allocated memory 13.98 GiB is allocated by PyTorch, and 129.48 MiB is"
        " reserved by"
        " PyTorch but unallocated." + TAIL,
        "no_allocator_can_help",
        {"free_bytes": 0, "allocated_bytes": round(13.98 * GIB)},
    ),
    (
        "YingqianWang/iPASSR #9: torch 2.0, beyond the capacity",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; 8.00 GiB total capacity;"
        " 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)" + OLD_TAIL,
        "no_allocator_can_help",
        {"reserved_bytes": round(19.15 * GIB), "unallocated_bytes": round(19.15 * GIB) - round(17.2 * GIB)},
    ),
    (
        "carolchenyx/MGFN. #35: torch 2.1 misspells it",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty"
        " of 6.00 GiB of"
        " which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by"
        " PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb",
        "fragmentation",
        {"capacity_bytes": 6 * GIB},
    ),
    (
        "One-2-3-45 #25: 5 MiB short, and printed to 10 MiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB total capacity;"
        " 649.97 MiB already allocated; 1.31 GiB free; 1.01 GiB reserved in total by PyTorch)" + OLD_TAIL,
        "no_allocator_can_help",
        {"allocated_bytes": round(649.97 * MIB)},
    ),
    (
        "pytorch/pytorch #59778: torch 1.8, refused with enough free",
        "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated;"
        " 3.03 GiB free; 1.24 GiB reserved in total by PyTorch) ",
        "driver_or_limit_refused",
        {},
    ),
    (
        "BasicVSR_PlusPlus #39: nothing unused",
        "`torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.12 GiB (GPU 0; 15.77 GiB total"
        " capacity; 13.52 GiB"
        " already allocated; 1.05 GiB free; 13.52 GiB reserved in total by PyTorch)`" + OLD_TAIL,
        "no_allocator_can_help",
        {"unallocated_bytes": 0},
    ),
    (
        "a fraction of the memory, in a tutorial of torch 1.8",
        "RuntimeError: CUDA out of memory. Tried to allocate 5.59 GiB (GPU 0; 11.17 GiB total capacity; 0 bytes already"
        " allocated; 10.91 GiB free; 5.59 GiB allowed; 0 bytes reserved in total by PyTorch)",
        "driver_or_limit_refused",
        {"allowed_bytes": round(5.59 * GIB), "allocated_bytes": 0},
    ),
    (
        "a fraction, in the newer wording",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 996.00 MiB. GPU 0 has a total capacity of 44.43"
        " GiB of which"
        " 9.06 GiB is free. Process 2102129 has 17.54 GiB memory in use. Including non-PyTorch memory, this process has"
        " 17.81 GiB memory in use. 17.69 GiB allowed; Of the allocated memory 17.44 GiB is allocated by PyTorch, and"
        " 59.88 MiB is reserved by PyTorch but unallocated." + TAIL,
        "driver_or_limit_refused",
        {"allowed_bytes": round(17.69 * GIB), "other_processes_bytes": round(17.54 * GIB)},
    ),
    (
        "WSL counts other processes as -1",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.13 GiB. GPU 0 has a total capacity of 8.00 GiB"
        " of which"
        " 6.10 GiB is free. Process 9132 has 17179869184.00 GiB memory in use. Including non-PyTorch memory, this"
        " process has"
        " 17179869184.00 GiB memory in use. 2.63 GiB allowed; Of the allocated memory 954.00 MiB is allocated by"
        " PyTorch,"
        " and 0 bytes is reserved by PyTorch but unallocated.",
        "driver_or_limit_refused",
        {"process_bytes": None, "other_processes_bytes": None},
    ),
    (
        "graphs hold memory",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 47.53"
        " GiB of which"
        " 896.00 KiB is free. Process 1686436 has 47.51 GiB memory in use. Of the allocated memory 47.00 GiB is"
        " allocated by"
        " PyTorch, with 46.22 GiB allocated in private pools (e.g., CUDA Graphs), and 149.10 MiB is reserved by"
        " PyTorch but"
        " unallocated." + TAIL,
        "fragmentation",
        {"private_bytes": round(46.22 * GIB), "free_bytes": 896 << 10},
    ),
    (
        "ROCm",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 978.00 MiB. GPU 0 has a total capacity of"
        " 15.98 GiB of"
        " which 630.00 MiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by"
        " PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_HIP_ALLOC_CONF",
        "no_allocator_can_help",
        {"backend": "HIP", "allocated_bytes": 0},
    ),
    (
        "Intel, broken over lines",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total capacity of"
        " 11.93 GiB of"
        " which 5.62 MiB is free.\nOf the allocated memory 10.43 GiB is allocated by PyTorch,\nand 94.57 MiB is"
        " reserved by"
        " PyTorch but unallocated.\n",
        "fragmentation",
        {"backend": "XPU"},
    ),
    (
        "a server's log without the GPU's number",
        "    tensor = tensor.to(device=self.device)\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to"
        " allocate 224.00"
        " MiB. GPU  has a total capacity of 44.34 GiB of which 160.81 MiB is free. Process 47694 has 44.17 GiB"
        " memory in"
        " use. Of the allocated memory 43.36 GiB is allocated by PyTorch, and 396.27 MiB is reserved by PyTorch but"
        " unallocated." + TAIL,
        "fragmentation",
        {"gpu": None},
    ),
    (
        "five other processes; quoted in markdown",
        "> torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.00 MiB. GPU 0 has a total capacity of"
        " 47.27 GiB of\n"
        "> which 9.38 MiB is free. Process 644963 has 5.59 MiB memory in use. Process 644977 has 5.59 MiB memory"
        " in use.\n"
        "> Process 2925282 has 312.00 MiB memory in use. Process 3053273 has 29.04 GiB memory in use. Process"
        " 3120922 has\n"
        "> 14.74 GiB memory in use. Including non-PyTorch memory, this process has 3.14 GiB memory in use. Of the"
        " allocated\n"
        "> memory 2.92 GiB is allocated by PyTorch, and 34.62 MiB is reserved by PyTorch but unallocated.",
        "fragmentation",
        {"other_processes_bytes": 2 * round(5.59 * MIB) + 312 * MIB + round(29.04 * GIB) + round(14.74 * GIB)},
    ),
    (
        "torch 1.0: what is cached is what is unused",
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 2.00 GiB total capacity; 1.17 GiB"
        " already"
        " allocated; 19.09 MiB free; 12.74 MiB cached)",
        "fragmentation",
        {"unallocated_bytes": round(12.74 * MIB)},
    ),
    (
        "XPU before 2.6: no word about what is unused",
        "XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of 28.55 GiB of which 12.01"
        " GiB is free.",
        "insufficient_data",
        {"request_bytes": round(59.61 * GIB)},
    ),
    (
        "Apple",
        "MPS backend out of memory (MPS allocated: 17.21 GiB, other allocations: 7.75 GiB, max allowed: 20.13"
        " GiB). Tried to"
        " allocate 14.00 MiB on private pool.",
        "insufficient_data",
        {"backend": "MPS", "free_bytes": None, "allowed_bytes": None},
    ),
    ("a shortened one", "RuntimeError: CUDA error: out of memory", "insufficient_data", {"request_bytes": None}),
]  # fmt: skip


@pytest.mark.parametrize(("where", "text", "verdict", "numbers"), REAL, ids=[r[0] for r in REAL])
def test_real_messages(where: str, text: str, verdict: str, numbers: dict[str, object]) -> None:
    found = diagnose(text)
    assert found.verdict == verdict, where
    message = asdict(found.message)
    assert {name: message[name] for name in numbers} == numbers
    assert all(value is None or value >= 0 for value in message.values() if not isinstance(value, str))
    assert found.short_bytes is None or found.short_bytes >= 0
    assert found.why
    assert bool(found.advice) == (verdict != "insufficient_data")
    assert "-" not in found.why.replace("out-of-memory", "")  # no negative number


def test_what_is_missing_is_worked_out() -> None:
    """22.78 GiB against 12.73 + 9.35 = 22.08 GiB: even perfect defragmentation is 0.70 GiB short."""
    found = diagnose(REAL[1][1])
    assert found.short_bytes == pytest.approx(0.70 * GIB, abs=0.01 * GIB)
    assert "716.80 MiB too little, however arranged" in found.why
    assert "at least 9.44 GiB of the unused bytes" in diagnose(REAL[2][1]).why


def test_what_is_just_enough() -> None:
    """Bounds belong to the kinder verdict: memory of just the size of the request can serve it."""
    text = (
        "CUDA out of memory. Tried to allocate {} bytes. GPU 0 has a total capacity of 900 bytes of which 500 bytes is "
        "free. {}Of the allocated memory 100 bytes is allocated by PyTorch, and 200 bytes is reserved by PyTorch but "
        "unallocated."
    )
    limited = "400 bytes allowed; "  # 100 more than what is reserved
    cases = [
        (500, "", "driver_or_limit_refused"), (501, "", "fragmentation"), (700, "", "fragmentation"),
        (701, "", "no_allocator_can_help"), (100, limited, "driver_or_limit_refused"), (300, limited, "fragmentation"),
        (301, limited, "driver_or_limit_refused"), (500, limited, "driver_or_limit_refused"),
        (501, limited, "no_allocator_can_help"),
    ]  # fmt: skip
    assert [diagnose(text.format(request, allowed)).verdict for request, allowed, _ in cases] == [c[2] for c in cases]


def test_numbers_too_coarse_to_be_sure() -> None:
    unsure = {where for where, text, _, _ in REAL if "too coarsely" in diagnose(text).why}
    assert unsure == {"One-2-3-45 #25: 5 MiB short, and printed to 10 MiB"}


def test_advice_fits() -> None:
    by_name = {where: diagnose(text) for where, text, _, _ in REAL}
    assert "raise the limit of 17.69 GiB" in by_name["a fraction, in the newer wording"].advice[0]
    assert "spills to system memory" in by_name[REAL[4][0]].why
    assert by_name["Intel, broken over lines"].advice[0].startswith("PYTORCH_ALLOC_CONF=expandable")
    assert by_name["pytorch/pytorch #152135"].advice[0].startswith("PYTORCH_CUDA_ALLOC_CONF=expandable")
    assert not any("other processes" in a for a in by_name["murong-xu/CADS #4"].advice)


def test_the_first_of_several_messages_counts() -> None:
    assert parse(REAL[1][1] + "\n\nDuring handling of the above, another:\n" + REAL[0][1]).request_bytes == round(
        22.78 * GIB
    )


OLD = (
    "CUDA out of memory. Tried to allocate {} (GPU 0; {} total capacity; {} already allocated; {} free; {} reserved in"
    " total by PyTorch)"
)


def test_thousands_may_be_parted_by_commas() -> None:
    sizes = (2048, 8192, 7000, 1024, 7100)
    plain = parse(OLD.format(*[f"{n}.00 MiB" for n in sizes]))
    assert parse(OLD.format(*[f"{n:,}.00 MiB" for n in sizes])) == plain
    assert parse(OLD.format(*[f"{n << 20:,} bytes" for n in sizes])) == plain
    assert plain.free_bytes == GIB


@pytest.mark.parametrize(
    "wrong", ["-1024.00", "\u22121024.00", "1.024,00", "1'024.00", "1 024.00", "1,5", "0,512", "9" * 30]
)
@pytest.mark.parametrize("place", range(5))
def test_numbers_that_cannot_be_read_are_not_guessed(wrong: str, place: int) -> None:
    sizes = ["2048.00 MiB", "8192.00 MiB", "7000.00 MiB", "100.00 MiB", "7100.00 MiB"]
    sizes[place] = f"{wrong} MiB"
    found = diagnose(OLD.format(*sizes))
    names = ("request_bytes", "capacity_bytes", "allocated_bytes", "free_bytes", "reserved_bytes")
    assert getattr(found.message, names[place]) is None
    if names[place] != "capacity_bytes":  # no verdict rests on it
        assert found.verdict == "insufficient_data"
    newer = REAL[0][1].replace("104.75 MiB is free", f"{wrong} MiB is free")
    assert diagnose(newer).verdict == "insufficient_data"


@pytest.mark.parametrize(
    "filler",
    [
        "7", "7,", "7.", "1,000", "a", " ", "\n", "\n>", "> ", ">", "e", "\x1b[", "\x1b]", "\x1b[0;", "(", " GPU 7",
        "Process 7", "Process 7 has 7 GiB ", "7 GiB ", "out of memory", "out of memory. Tried to allocate ",
        "CUDA out of memory (", "CUDA ", "CUDA out of memory. Tried to allocate 7 GiB ",
    ],
)  # fmt: skip
def test_a_megabyte_of_anything_is_read_at_once(filler: str) -> None:
    many = filler * (1_000_000 // len(filler))
    for text in (f"CUDA out of memory. Tried to allocate {many}", f"{many} CUDA out of memory. {many} free", f"{many}"):
        before = time.process_time()
        if "out of memory" in text:
            parse(text)
        else:
            with pytest.raises(GpubloatError):
                parse(text)
        assert time.process_time() - before < 1


def test_no_gpu_has_a_number_of_thousands_of_digits() -> None:
    assert parse("out of memory GPU " + 4301 * "1").gpu is None
    assert parse("out of memory GPU 12").gpu == 12


def test_other_words_about_memory_do_not_hide_the_message() -> None:
    for where, text, verdict, _ in REAL:
        before = "WARNING: 5.00 GiB free, on MPS the machine may run out of memory\nGPU 7: 1.00 GiB free\n"
        found = diagnose(before + text)
        assert found.verdict == verdict or "shortened" in where
        if found.message.request_bytes is not None:
            assert found.message == parse(text)


def test_colours_of_terminals_are_no_part_of_it() -> None:
    for _, text, _, _ in REAL:
        coloured = text.replace(" GiB", "\x1b[0m GiB").replace("of memory", "\x1b[1;31mof\x1b[0m memory")
        assert parse(
            f"\x1b]0;title\x07\x1b[31m{coloured}\x1b[K".replace("allocate ", "allocate \x1b[38;5;9m")
        ) == parse(text)


@pytest.mark.parametrize("text", ["", "all is well", "Killed", "KeyError: 'memory'", "\0\x1b[31m"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(GpubloatError, match="no out-of-memory message"):
        parse(text)


def printed(n: int) -> str:
    """As c10::CachingAllocator::format_size prints sizes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if n > unit:
            return f"{n / unit:.2f} {name}"
    return f"{n} bytes"


@given(st.tuples(*[st.integers(0, 1 << 44)] * 5), st.booleans())
def test_any_numbers_in_both_wordings(numbers: tuple[int, ...], is_old: bool) -> None:
    request, total, free, allocated, unused = numbers
    if is_old:
        text = (
            f"CUDA out of memory. Tried to allocate {printed(request)} (GPU 3; {printed(total)} total capacity; "
            f"{printed(allocated)} already allocated; {printed(free)} free; "
            f"{printed(allocated + unused)} reserved in total by PyTorch)"
        )
    else:
        text = (
            f"CUDA out of memory. Tried to allocate {printed(request)}. GPU 3 has a total capacity of {printed(total)} "
            f"of which {printed(free)} is free. Of the allocated memory {printed(allocated)} is allocated by PyTorch, "
            f"and {printed(unused)} is reserved by PyTorch but unallocated."
        )
    found = diagnose(text)
    m = found.message
    assert m.gpu == 3
    for mine, true in ((m.request_bytes, request), (m.free_bytes, free), (m.allocated_bytes, allocated)):
        assert mine == pytest.approx(true, rel=0.006, abs=8)  # two decimals
    assert m.request_bytes is not None
    assert m.free_bytes is not None
    assert m.unallocated_bytes is not None
    rule = (
        "driver_or_limit_refused" if m.request_bytes <= m.free_bytes
        else "no_allocator_can_help" if m.request_bytes > m.free_bytes + m.unallocated_bytes
        else "fragmentation"
    )  # fmt: skip
    assert found.verdict == rule


@given(st.text() | st.text().map(lambda t: f"CUDA out of memory. {t} GiB free 1e999 GiB allowed"))
def test_no_text_breaks_it(text: str) -> None:
    try:
        verdict = diagnose(text).verdict
    except GpubloatError:
        assert "out of memory" not in text.lower()
    else:
        assert verdict in oom.VERDICTS


# Traces


def pinned(request: int) -> list[tuple[object, ...]]:
    """Four segments, each with a survivor of 4 MiB at its end; then a large request."""
    done: list[tuple[object, ...]] = []
    for i in range(4):
        large = (30 + 2 * i) * MIB
        done += [("alloc", f"all{i}", large, 0, "0.0"), ("free", f"all{i}")]
        done += [("alloc", f"most{i}", large - 4 * MIB, 0, "0.0"), ("alloc", f"rest{i}", 4 * MIB, 0, "0.0")]
        done += [("free", f"most{i}")]
    return [*done, ("alloc", "request", request, 0, "0.0")]


def trace(limit: int, request: int) -> snapshot.Snapshot:
    made = snapshot.recorded(Caching(Driver(limit)), pinned(request))
    for event in made["device_traces"][0]:
        if event["action"] == "oom":
            event["device_free"] = limit - sum(s["total_size"] for s in made["segments"])
    return made


def test_an_oom_event_is_diagnosed_and_replayed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = memory.load(snapshot.write(tmp_path / "a.pickle", trace(140 * MIB, 60 * MIB)))
    reserved = int(run["segments"]["size_bytes"].sum())
    found = oomtrace.of_trace(run)
    ((device, event),) = found
    verdict = found[device, event]
    assert verdict.verdict == "fragmentation"
    assert verdict.message.free_bytes == 140 * MIB - reserved
    assert verdict.message.unallocated_bytes == reserved - 16 * MIB == 116 * MIB
    helped = oomtrace.would_have_helped(run, device, event)
    assert {"expandable", "stitching"} & set(helped.loc[helped["is_served"], "allocator"])
    for row in helped[helped["is_served"]].itertuples():
        assert row.limit_bytes == 140 * MIB
        assert row.spare_bytes == row.limit_bytes - row.reserved_bytes >= 0
        assert row.reserved_bytes >= 60 * MIB + 16 * MIB
    assert not helped.loc[helped["allocator"] == "caching", "is_served"].any()
    same = oomtrace.would_have_helped(run, device, event, (("caching", {}),)).iloc[0]
    assert not same["is_served"]  # as recorded


def test_nothing_helps_where_memory_is_too_small(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = memory.load(snapshot.write(tmp_path / "a.pickle", trace(140 * MIB, 200 * MIB)))
    ((device, event),) = oomtrace.of_trace(run)
    assert oomtrace.of_trace(run)[device, event].verdict == "no_allocator_can_help"
    assert not oomtrace.would_have_helped(run, device, event)["is_served"].any()


def test_only_oom_events_can_be_asked_for(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = memory.load(snapshot.write(tmp_path / "a.pickle", trace(140 * MIB, 60 * MIB)))
    with pytest.raises(GpubloatError, match="event 0 of GPU 0 is no out-of-memory event"):
        oomtrace.would_have_helped(run, 0, 0)


def test_a_refusal_of_memory_that_was_free(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = trace(140 * MIB, 60 * MIB)
    for event in made["device_traces"][0]:
        if event["action"] == "oom":
            event["device_free"] = 10 * GIB
    run = memory.load(snapshot.write(tmp_path / "a.pickle", made))
    (verdict,) = oomtrace.of_trace(run).values()
    assert verdict.verdict == "driver_or_limit_refused"
