"""Files of packed tensors: what was saved is loaded, and nothing else ever is."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpubloat.errors import FormatError, GpubloatError
from gpubloat.tensors import ibpfile
from gpubloat.tensors.codebook import fit
from gpubloat.tensors.packing import Packed, pack, unpack, unpack_rows


def examples() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        "weights": (rng.standard_normal((40, 12)) * 0.05).astype(np.float32),
        "a/name with ünïcode\n": rng.integers(0, 9, (7, 3, 5)).astype(np.uint8),
        "empty": np.zeros((0, 4), np.float16),
        "nothing in rows": np.zeros((3, 0), np.int64),
        "scalar": np.asarray(np.float64(-0.0)),
        "": np.full((100, 8), np.nan, np.float16),
    }


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("ibp") / "file.ibp"
    ibpfile.save(path, {name: pack(x) for name, x in examples().items()})
    return path.read_bytes()


def loaded(tmp_path: Path, data: bytes) -> dict[str, Packed]:
    path = tmp_path / "changed.ibp"
    path.write_bytes(data)
    return ibpfile.load(path)


@pytest.mark.parametrize("layout", ["condensed", "slots"])
def test_what_was_saved_is_loaded_and_mapped(tmp_path: Path, layout: str) -> None:
    tensors = {name: pack(x, layout=layout) for name, x in examples().items()}  # type: ignore[arg-type]
    ibpfile.save(tmp_path / "new" / "file.ibp", tensors)
    found = ibpfile.load(tmp_path / "new" / "file.ibp")
    assert list(found) == list(tensors)
    for name, x in examples().items():
        ours, theirs = tensors[name], found[name]
        back = unpack(theirs)
        assert (back.shape, back.dtype, back.tobytes()) == (x.shape, x.dtype, x.tobytes())
        assert unpack_rows(theirs, [0]).tobytes() == x.reshape(-1, *x.shape[1:])[:1].tobytes() if x.size else True
        assert (theirs.shape, theirs.layout, theirs.crc32) == (ours.shape, layout, ours.crc32)
        assert theirs.codebook.estimate == ours.codebook.estimate
        assert theirs.packed_bytes == ours.packed_bytes
        assert not theirs.words.flags.writeable
        assert not theirs.words.flags.owndata


def test_no_tensors_and_thresholds_are_kept(tmp_path: Path) -> None:
    ibpfile.save(tmp_path / "none.ibp", {})
    assert ibpfile.load(tmp_path / "none.ibp") == {}
    x = examples()["weights"]
    ibpfile.save(tmp_path / "one.ibp", {"x": pack(x, fit(x, 16, [0.7, 0.8], always=False))})
    codebook = ibpfile.load(tmp_path / "one.ibp")["x"].codebook
    assert codebook.threshold in (0.7, 0.8)
    assert codebook.chunk_bits == 16


def test_sections_are_aligned_and_the_file_is_as_large_as_the_packed_bytes_say(valid: bytes, tmp_path: Path) -> None:
    for packed in loaded(tmp_path, valid).values():
        for array in (packed.words, packed.row_words, packed.codebook.always):
            assert array.ctypes.data % 64 == 0 or not array.size
    x = np.random.default_rng(0).standard_normal((3000, 64)).astype(np.float32)
    packed = pack(x)
    ibpfile.save(tmp_path / "x.ibp", {"x": packed})
    assert 0 <= (tmp_path / "x.ibp").stat().st_size - packed.packed_bytes < 2048


def test_a_file_is_not_overwritten_unless_asked_and_never_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.ibp"
    x, y = pack(np.arange(60).reshape(20, 3)), pack(np.zeros((5, 8)))
    ibpfile.save(path, {"x": x})
    before = path.read_bytes()
    with pytest.raises(GpubloatError, match="exists") as error:
        ibpfile.save(path, {"y": y})
    assert error.value.hint
    assert path.read_bytes() == before
    old = ibpfile.load(path)["x"]

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ibpfile.os, "replace", fails)
        with pytest.raises(GpubloatError, match="No space left"):
            ibpfile.save(path, {"y": y}, force=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    ibpfile.save(path, {"y": y}, force=True)
    assert list(ibpfile.load(path)) == ["y"]
    assert (unpack(old) == np.arange(60).reshape(20, 3)).all()  # what is mapped stays
    ibpfile.save(path, {"y": ibpfile.load(path)["y"], "z": old}, force=True)  # also from the file that is replaced
    assert list(ibpfile.load(path)) == ["y", "z"]
    with pytest.raises(GpubloatError, match="is a folder"):
        ibpfile.save(tmp_path, {})
    with pytest.raises(GpubloatError, match="cannot be read"):
        ibpfile.load(tmp_path / "absent")


def test_every_flipped_byte_is_found(valid: bytes, tmp_path: Path) -> None:
    """Header, sections, and the zeros between them."""
    rng = np.random.default_rng(0)
    places = {*range(200), *range(len(valid) - 70, len(valid)), *rng.integers(0, len(valid), 500).tolist()}
    for at in sorted(places):
        data = bytearray(valid)
        data[at] ^= 1 << int(rng.integers(0, 8))
        with pytest.raises(FormatError):
            loaded(tmp_path, bytes(data))


def test_every_truncation_and_addition_is_found(valid: bytes, tmp_path: Path) -> None:
    for end in [*range(0, len(valid), 37), len(valid) - 1]:
        with pytest.raises(FormatError):
            loaded(tmp_path, valid[:end])
    for extra in (b"\0", b"x" * 64, valid):
        with pytest.raises(FormatError, match="should have"):
            loaded(tmp_path, valid + extra)
    for foreign in (b"", b"\0" * 100, b"PK\3\4" + b"\0" * 60, b'{"tensors": []}' * 10):
        with pytest.raises(FormatError):
            loaded(tmp_path, foreign)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=8),
    end=st.none() | st.integers(0, 2**20),
)
def test_random_damage_is_found(valid: bytes, tmp_path: Path, changes: list[tuple[int, int]], end: int | None) -> None:
    data = bytearray(valid)
    for at, change in changes:
        data[at % len(data)] ^= change
    data = data[: end and end % len(data)]
    if bytes(data) == valid:
        return
    with pytest.raises(FormatError):
        loaded(tmp_path, bytes(data))


def sealed(header: Any, sections: bytes = b"", length: int | None = None) -> bytes:
    """A file whose checksum of the header is right, whatever the header says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = text + bytes(-(32 + len(text)) % 64) + sections
    sizes = struct.pack("<QQ", len(text) if length is None else length, 32 + len(body))
    return ibpfile.MAGIC + struct.pack("<II", 1, zlib.crc32(sizes + text)) + sizes + body


def one(valid: dict[str, Any], sections: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    entry = json.loads(json.dumps(valid))
    change(entry)
    return sealed({"tensors": [entry]}, sections)


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(entry: Any) -> None:
        for key in keys[:-1]:
            entry = entry[key]
        entry[keys[-1]] = to

    return change


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (_set("dtype", to="float128"), "unknown dtype"),
    (_set("dtype", to=["fp32"]), "unknown dtype"),
    (_set("dtype", to="fp64"), "inconsistent"),
    (_set("shape", to=[41, 12]), "inconsistent"),
    (_set("shape", to=[40, 13]), "inconsistent"),
    (_set("shape", to=[40, -12]), "no shape"),
    (_set("shape", to=[True, 12]), "no shape"),
    (_set("shape", to=[40.0, 12]), "no shape"),
    (_set("shape", to="40"), "no shape"),
    (_set("shape", to=[1] * 65), "no shape"),
    (_set("shape", to=[2**62, 12]), "impossible shape"),
    (_set("shape", to=[0, 2**62, 2**62]), "impossible shape"),
    (_set("shape", to=[2**200]), "no shape"),
    (_set("shape", to=[2**40, 12]), "inconsistent"),
    (_set("shape", to=[40, 2**40]), "inconsistent"),
    (_set("chunk_bits", to=24), "chunk width"),
    (_set("chunk_bits", to=None), "chunk width"),
    (_set("layout", to="rows"), "inconsistent"),
    (_set("layout", to="slots"), "inconsistent"),
    (_set("layout", to=1), "no layout"),
    (_set("crc32", to=-1), "no layout or no checksum"),
    (_set("threshold", to="0.7"), "threshold"),
    (_set("threshold", to=0.2), "threshold"),
    (_set("estimate", to={}), "estimate"),
    (_set("estimate", "raw_bytes", to=1.5), "estimate"),
    (_set("estimate", "saving_frac", to="much"), "estimate"),
    (_set("name", to=3), "lacks something"),
    (_set("more", to=3), "lacks something"),
    (lambda entry: entry.pop("crc32"), "lacks something"),
    (lambda entry: entry["sections"].pop("mask"), "lacks a section"),
    (_set("sections", to=[]), "lacks a section"),
    (_set("sections", "mask", to=[0, 48]), "has no place"),
    (_set("sections", "mask", 0, to=0), "is said to be"),
    (_set("sections", "mask", 0, to=2**63), "has no place"),
    (_set("sections", "mask", 0, to=2**63 - 1), "is said to be"),
    (_set("sections", "mask", 1, to=2**62), "is said to be"),
    (_set("sections", "words", 1, to=4), "is damaged"),
    (_set("sections", "words", 2, to=0), "is damaged"),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], bytes]:
    """The header's entry of one tensor, and the sections after it."""
    path = tmp_path_factory.mktemp("ibp") / "one.ibp"
    ibpfile.save(path, {"weights": pack(examples()["weights"], fit(examples()["weights"], 32))})
    data = path.read_bytes()
    length = int.from_bytes(data[16:24], "little")
    return json.loads(data[32 : 32 + length])["tensors"][0], data[-(-(32 + length) // 64) * 64 :]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_headers_that_lie_with_a_right_checksum_are_refused(
    weights: tuple[dict[str, Any], bytes], tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    assert list(loaded(tmp_path, one(*weights, lambda _: None))) == ["weights"]
    with pytest.raises(FormatError, match=message) as error:
        loaded(tmp_path, one(*weights, change))
    assert error.value.hint


def test_lengths_of_rows_that_do_not_sum_up_are_refused(weights: tuple[dict[str, Any], bytes], tmp_path: Path) -> None:
    entry, sections = weights
    offset, n_bytes, _ = entry["sections"]["row_words"]
    for position, value in ((0, 0), (3, 2**32 - 1)):
        lengths = np.frombuffer(sections[offset : offset + n_bytes], np.uint32).copy()
        lengths[position] = value
        changed = sections[:offset] + lengths.tobytes() + sections[offset + n_bytes :]
        with pytest.raises(FormatError, match="inconsistent"):
            loaded(tmp_path, one(entry, changed, _set("sections", "row_words", 2, to=zlib.crc32(lengths.tobytes()))))


def test_codebooks_that_contradict_themselves_are_refused(
    weights: tuple[dict[str, Any], bytes], tmp_path: Path
) -> None:
    entry, sections = weights
    everything = b"\xff" * 48
    for part in ("always", "mask", "value"):
        offset = entry["sections"][part][0]
        changed = sections[:offset] + everything + sections[offset + 48 :]
        with pytest.raises(FormatError, match="contradict"):
            loaded(tmp_path, one(entry, changed, _set("sections", part, 2, to=zlib.crc32(everything))))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'"tensors"',
        b'{"tensors": {}}',
        b'{"tensors": [1]}',
        b'{"tensors": [[]], "more": 1}',
        b"[" * 100_000,
        b'{"tensors": [' + b"1" * 10_000 + b"]}",
        b"\xff\xfe{}",
        b'{"tensors": [NaN]}',
    ],
)
def test_headers_that_are_something_else_are_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(FormatError):
        loaded(tmp_path, sealed(header))


def test_names_twice_and_headers_longer_than_the_file_are_refused(
    weights: tuple[dict[str, Any], bytes], tmp_path: Path
) -> None:
    entry, sections = weights
    with pytest.raises(FormatError, match="two tensors are called"):
        loaded(tmp_path, sealed({"tensors": [entry, entry]}, sections))
    for length in (2**64 - 1, 2**40, 65 << 20):
        with pytest.raises(FormatError, match="has a header of"):
            loaded(tmp_path, sealed({"tensors": []}, length=length))


def test_sizes_that_the_file_does_not_have_take_no_memory(
    weights: tuple[dict[str, Any], bytes], tmp_path: Path
) -> None:
    entry, sections = weights
    tracemalloc.start()
    for shape in ([2**40, 12], [40, 2**40], [2**50], [2**30, 2**20]):
        with pytest.raises(FormatError):
            loaded(tmp_path, one(entry, sections, _set("shape", to=shape)))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), chunk_bits=st.sampled_from([8, 16, 32]), part=st.sampled_from(["words", "mask"]))
def test_rows_that_lie_with_right_checksums_are_never_read_past_and_never_returned(
    weights: tuple[dict[str, Any], bytes], tmp_path: Path, seed: int, chunk_bits: int, part: str
) -> None:
    """Random words, or the same bytes as another codebook: the flags or the tensor's own checksum tell."""
    entry, sections = weights
    rng = np.random.default_rng(seed)
    offset, n_bytes, _ = entry["sections"][part]
    content = rng.bytes(n_bytes) if part == "words" else bytes(n_bytes)
    changed = sections[:offset] + content + sections[offset + n_bytes :]
    if part == "mask":  # nor may its values stay
        value_at = entry["sections"]["value"][0]
        always_at = entry["sections"]["always"][0]
        always, value = (np.frombuffer(changed[at : at + 48], np.uint8) for at in (always_at, value_at))
        changed = changed[:value_at] + (always & value).tobytes() + changed[value_at + 48 :]

    def change(entry: dict[str, Any]) -> None:
        entry["chunk_bits"] = chunk_bits
        for place in entry["sections"].values():
            place[2] = zlib.crc32(changed[place[0] : place[0] + place[1]])

    packed = loaded(tmp_path, one(entry, changed, change))["weights"]
    with pytest.raises(GpubloatError, match=r"is damaged|checksum differs"):
        unpack(packed)


def test_constant_rows_take_no_words_in_the_file(tmp_path: Path) -> None:
    ibpfile.save(tmp_path / "zeros.ibp", {"zeros": pack(np.zeros((4000, 1024), np.uint8))})
    found = ibpfile.load(tmp_path / "zeros.ibp")["zeros"]
    assert not len(found.words)
    assert unpack(found).shape == (4000, 1024)
    assert (tmp_path / "zeros.ibp").stat().st_size < 4 * 4000 + 3 * 1024 + 2048
