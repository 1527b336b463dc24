"""Pickles that want to run code, or to cost memory or time: refused at the byte, before anything is unpickled."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubloat import memory
from gpubloat.errors import FormatError
from gpubloat.memory import pickles
from tests.build import snapshot

MB = 1 << 20
HEAD = b"\x80\x04"
FORMS = {
    "numbers": {"segments": [0, 1, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**63, 2**64 - 1, 1.5, -(2**63)]},
    "texts": {"segments": ["", "a" * 255, "a" * 256, "é" * 70000, "\ud800", None, True, False]},
    "pools": {"segments": [(), (0,), (0, 0), (1, 2, 3), (2**40, 0), (1, 2, 3, 4), [0, 0]]},
    "shared": {"segments": [[snapshot.FRAME] * 3] * 3},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("form", FORMS)
def test_plain_data_is_read_as_it_was(form: str, protocol: int) -> None:
    data = pickle.dumps(FORMS[form], protocol)
    assert pickles.loads(data, "x") == FORMS[form]
    assert pickles.loads(pickletools.optimize(data), "x") == FORMS[form]


def test_many_memo_slots() -> None:
    content = [[i] for i in range(70_000)]
    assert pickles.loads(pickle.dumps(content, 2), "x") == content


class Evil:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


HOSTILE = {
    "system": pickle.dumps({"segments": Evil(os.system, ("false",))}, 4),
    "eval": pickle.dumps([Evil(eval, ("1",))], 2),
    "ordered": pickle.dumps(__import__("collections").OrderedDict(a=1), 5),
    "path": pickle.dumps(Path("x"), 4),
    "global": HEAD + b"cos\nsystem\n.",
    "inst": HEAD + b"(ios\nsystem\n.",
    "obj": HEAD + b"(o.",
    "newobj": HEAD + b"))\x81.",
    "newobj_ex": HEAD + b")))\x92.",
    "stack_global": HEAD + b"\x8c\x02os\x8c\x06system\x93.",
    "reduce": HEAD + b"))R.",
    "build": HEAD + b"}}b.",
    "ext1": HEAD + b"\x82\x01.",
    "ext2": HEAD + b"\x83\x01\x00.",
    "ext4": HEAD + b"\x84\x01\x00\x00\x00.",
    "persid": HEAD + b"P1\n.",
    "binpersid": HEAD + b"K\x01Q.",
    "buffer": b"\x80\x05\x97.",
    "readonly": b"\x80\x05\x97\x98.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_opcode_that_could_run_code_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="could run code; refused") as caught:
        pickles.loads(HOSTILE[name], "x")
    assert caught.value.hint
    assert 2 <= caught.value.offset < len(HOSTILE[name])


def test_the_second_line_of_defence() -> None:
    plain = pickles._Plain(io.BytesIO(HOSTILE["system"]), "x")
    with pytest.raises(FormatError, match="refused"):
        plain.load()
    with pytest.raises(FormatError, match="refused"):
        pickles._Plain(io.BytesIO(HOSTILE["binpersid"]), "x").load()


FOREIGN = {
    "empty": b"",
    "short": b"\x80\x04",
    "text": b"hello, world",
    "protocol 0": pickle.dumps([1], 0),
    "protocol 1": pickle.dumps([1], 1),
    "protocol 6": b"\x80\x06].",
    "bytearray": pickle.dumps(bytearray(b"a"), 5),
    "set": pickle.dumps({1}, 4),
    "frozenset": pickle.dumps(frozenset([1]), 4),
    "text integer": HEAD + b"I1\n.",
    "text float": HEAD + b"F1\n.",
    "text put": HEAD + b"]p5\n.",
    "text get": HEAD + b"g5\n.",
    "duplicate": HEAD + b"]2.",
    "tuple of a tuple": pickle.dumps(((1, 2), 3), 4),
    "tuple of text": pickle.dumps(("a", "b"), 4),
    "unknown opcode": HEAD + b"\xff.",
    "no stop": HEAD + b"]",
    "no such memo": HEAD + b"h\x05.",
    "empty stack": HEAD + b".",
    "append to nothing": HEAD + b"K\x01a.",
    "append to a number": HEAD + b"K\x01K\x01a.",
    "list as key": HEAD + b"}]K\x01s.",
    "no mark": HEAD + b"]K\x01e.",
    "bad utf-8": HEAD + b"\x8c\x01\xff.",
    "second protocol": HEAD + HEAD + b"].",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_snapshot(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        pickles.loads(FOREIGN[name], "x")
    assert caught.value.message.startswith("x: at byte")
    assert caught.value.hint


HUGE = {
    "memo slot": HEAD + b"]r\xff\xff\xff\x7f.",
    "memo slot of 2 GiB": HEAD + b"]" * 1000 + b"r\x00\x00\x00\x10.",
    "memo get": HEAD + b"j\xff\xff\xff\xff.",
    "text": HEAD + b"X\xff\xff\xff\x7fabc.",
    "text8": HEAD + b"\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
    "text8 of 2**64 - 1": HEAD + b"\x8d" + b"\xff" * 8 + b"abc.",
    "bytes8": HEAD + b"\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"abc.",
    "integer": HEAD + b"\x8b" + struct.pack("<i", 4 * MB) + b"\x01" * 4 * MB + b".",
    "integer, negative length": HEAD + b"\x8b" + struct.pack("<i", -1) + b".",
    "integer of 255 bytes": HEAD + b"\x8a\xff" + b"\x01" * 255 + b".",
    "frame": HEAD + b"\x95" + struct.pack("<Q", 1 << 62) + b"].",
    "frame of 2**40": HEAD + b"\x95" + struct.pack("<Q", 1 << 40) + b"].",
}


@pytest.mark.parametrize("name", HUGE)
def test_sizes_that_no_file_has(name: str) -> None:
    tracemalloc.start()
    with pytest.raises(FormatError):
        pickles.loads(HUGE[name], "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * MB


def test_deep_nesting() -> None:
    deep = HEAD + b"]" * 300_000 + b"a" * 299_999 + b"."
    assert isinstance(pickles.loads(deep, "x"), list)
    with pytest.raises(FormatError):  # a tuple that is hashed for ever, or until the stack ends
        pickles.loads(HEAD + b"}" + b")" + b"\x85" * 300_000 + b"K\x01s.", "x")
    doubled = b"K\x01K\x01\x86" + b"q\x01h\x01h\x01\x86" * 100
    with pytest.raises(FormatError):
        pickles.loads(HEAD + b"}" + doubled + b"K\x01s.", "x")


def test_integers_of_nine_bytes() -> None:
    assert pickles.loads(HEAD + b"]\x8a\x09" + b"\xff" * 8 + b"\x00a.", "x") == [2**64 - 1]


def whole() -> bytes:
    trace = [snapshot.event("alloc", 4096, 512, frames=[snapshot.FRAME]), snapshot.event("snapshot", 0, 1)]
    return pickle.dumps(snapshot.snapshot([snapshot.segment(4096, [snapshot.block(512)])], trace), 4)


def test_cut_at_every_length() -> None:
    data = whole()
    for size in range(len(data)):
        with pytest.raises(FormatError):
            pickles.loads(data[:size], "x")
    assert pickles.loads(data + b"more", "x") == pickle.loads(data)


def test_thousands_of_changed_bytes(tmp_path: Path) -> None:
    """A FormatError or a run; never another exception."""
    chance, good = random.Random(3), whole()
    n_read = 0
    for i in range(3000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        try:
            pickles.loads(bytes(data), "x")
        except FormatError:
            continue
        n_read += 1
        if i % 20 == 0:
            (tmp_path / "x").write_bytes(data)
            try:
                memory.load(tmp_path / "x")
            except FormatError:
                continue
    assert n_read > 100


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes(data: bytes) -> None:
    for head in (b"", HEAD):
        with contextlib.suppress(FormatError):
            pickles.loads(head + data, "x")


def test_time_and_memory_are_linear() -> None:
    trace = [snapshot.event("alloc", i * 512, 512, frames=[dict(snapshot.FRAME)]) for i in range(50_000)]
    data = pickle.dumps(snapshot.snapshot([], trace), 4)
    before = time.process_time()
    tracemalloc.start()
    pickles.walk(data, "x")
    assert tracemalloc.get_traced_memory()[1] < MB
    tracemalloc.stop()
    assert time.process_time() - before < 5
