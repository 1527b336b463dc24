"""Loaded libraries as the evidence of a run needs them.

From a place in memory to a region, from a region to the element that the driver takes, from the content of a cubin to
the elements that hold it, from an element to its names.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from gpubloat.errors import FormatError
from gpubloat.libraries import contents, fatbin, hostdata, inputs
from gpubloat.libraries.contents import Code
from gpubloat.libraries.elf import Elf
from gpubloat.libraries.fatbin import Element
from gpubloat.libraries.hostdata import RawCubin
from gpubloat.libraries.inputs import Input
from gpubloat.libraries.reader import Reader
from gpubloat.tables import targets

Key = tuple[str, int, int]  # library, region, element
Content = tuple[int, int]  # crc32, size


@dataclass(frozen=True, slots=True)
class Place:
    """Where a loaded image lies. `region` is None if it is in no region, `elements` what the driver takes of it."""

    library: str
    region: int | None = None
    elements: tuple[Key, ...] = ()


@dataclass(slots=True)
class Loadable:
    """The scan tables of the loaded libraries, indexed. `problems` is (library, detail) of what could not be read."""

    paths: Mapping[str, str]
    regions: pd.DataFrame
    elements: pd.DataFrame
    chosen: dict[tuple[str, int], tuple[Key, ...]]
    compiled: set[tuple[str, int]]  # regions of which the driver takes PTX or LTO-IR
    problems: list[tuple[str, str]] = field(default_factory=list)
    _files: dict[str, tuple[Reader, Elf] | None] = field(default_factory=dict)
    _by_path: dict[str, str] = field(default_factory=dict)
    _starts: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict)

    def file(self, library: str) -> tuple[Reader, Elf] | None:
        """A library's bytes and ELF view; None, and a problem, if it cannot be read any more."""
        if library not in self._files:
            try:
                with inputs.opened(Input(library, library, self.paths[library])) as reader:
                    self._files[library] = reader, Elf(reader)
            except FormatError as error:
                self.problems.append((library, error.detail))
                self._files[library] = None
        return self._files[library]

    def library(self, path: str) -> str | None:
        """The library at `path`, also where one of the two paths goes through symbolic links."""
        if not self._by_path:
            for name, known in self.paths.items():
                self._by_path.setdefault(os.path.realpath(known), name)
            self._by_path.update({known: name for name, known in self.paths.items()})
        found = self._by_path.get(path)
        return self._by_path.get(os.path.realpath(path)) if found is None and path.isprintable() else found

    def at(self, path: str, vaddr: int) -> Place | None:
        """What lies at `vaddr` of the object mapped from `path`; None if that is no loaded library."""
        library = self.library(path)
        if library is None:
            return None
        file = self.file(library)
        if file is None or vaddr >= 1 << 63:
            return Place(library)
        offset = int(file[1].file_offsets(np.array([vaddr], np.uint64))[0])
        starts, sizes, numbers = self._regions_of(library)
        index = int(np.searchsorted(starts, offset, "right")) - 1
        if offset < 0 or index < 0 or offset >= starts[index] + sizes[index]:
            return Place(library)
        region = int(numbers[index])
        if offset == starts[index]:
            return Place(library, region, self.chosen.get((library, region), ()))
        # Not the container but an element of it was given to the driver.
        rows = self.of_region(library, region)
        begins = rows["offset_bytes"] + rows["header_bytes"]
        inside = rows[(begins <= offset) & (offset < begins + rows["payload_bytes"])]
        return Place(library, region, tuple((library, region, int(e)) for e in inside["element"]))

    def of_region(self, library: str, region: int) -> pd.DataFrame:
        """The elements of a region, members of concatenated ones left out."""
        rows = self.elements
        return rows[(rows["library"] == library) & (rows["region"] == region) & rows["member"].isna()]

    def _regions_of(self, library: str) -> tuple[Any, Any, Any]:
        if library not in self._starts:
            rows = self.regions[self.regions["library"] == library].sort_values("offset_bytes")
            columns = (rows[name].to_numpy(np.int64) for name in ("offset_bytes", "size_bytes", "region"))
            self._starts[library] = tuple(columns)  # type: ignore[assignment]
        return self._starts[library]

    def code(self, row: Any) -> Element | RawCubin:
        """The record of one row of `elements`. FormatError if the file is another one by now."""
        file = self.file(row.library)
        if file is None:
            raise FormatError(row.library, 0, "cannot be read")
        if not row.header_bytes and row.member is pd.NA:
            return RawCubin(row.offset_bytes, row.payload_bytes, row.uncompressed_bytes, row.compression, row.target)
        return fatbin.element(file[0], row.offset_bytes, file[0].size)

    def holding(self, wanted: Iterable[Content]) -> dict[Content, list[Key]]:
        """Elements whose decompressed content is one of `wanted`: only elements of that size are decompressed.

        A payload stored raw is padded to 8 bytes, and the driver may round a size up likewise: sizes count as equal
        within the same 8 bytes, and zeros make up the difference.
        """
        by_size: dict[int, set[Content]] = defaultdict(set)
        for content in wanted:
            by_size[(content[1] + 7) // 8].add(content)
        rows = self.elements
        fits = (rows["kind"] == "cubin") & rows["is_loadable"] & ((rows["uncompressed_bytes"] + 7) // 8).isin(by_size)
        found: dict[Content, list[Key]] = {}
        candidates: Any = rows[fits].sort_values(["library", "offset_bytes"]).itertuples(index=False)
        for row in candidates:
            if self.file(row.library) is None:
                continue  # a problem of this library already
            try:
                data = self._content(row)
            except FormatError as error:
                self.problems.append((row.library, error.detail))
                continue
            for crc, size in by_size[(row.uncompressed_bytes + 7) // 8]:
                if zlib.crc32(data[:size].ljust(size, b"\0")) == crc:
                    keys = found.setdefault((crc, size), [])
                    if (key := (row.library, row.region, row.element)) not in keys:
                        keys.append(key)
        return found

    def _content(self, row: Any) -> bytes:
        code = self.code(row)
        file = self.file(row.library)
        assert file is not None  # `code` has read it
        reader = file[0]
        if isinstance(code, RawCubin):
            return bytes(hostdata.content(reader, code))
        data = bytes(fatbin.payload(reader, code))
        if code.kind == "concat":
            table = fatbin.members(reader, code)
            if row.member >= len(table):
                raise reader.error(code.offset, "concatenated element that has changed")
            member = table[row.member]
            data = data[member.offset : member.offset + member.size]
        reader.release()
        return data

    def names(self, rows: pd.DataFrame) -> dict[Key, tuple[set[str], set[str]]]:
        """Kernels and variables of the loadable elements among `rows`; nothing for those that cannot be read."""
        found: dict[Key, tuple[set[str], set[str]]] = {}
        for library, part in rows[rows["member"].isna() & rows["is_loadable"]].groupby("library", observed=True):
            records: Any = part.itertuples(index=False)
            try:
                file = self.file(str(library))
                pieces = [Code(r.region, r.element, self.code(r)) for r in records]
            except FormatError:
                continue  # a problem of this library already
            if file is None:
                continue
            for read in contents.read_all(file[0], pieces):
                kernels, variables = found.setdefault((str(library), read.region, read.index), (set(), set()))
                kernels.update(read.contents.kernels)
                variables.update(read.contents.variables)
                if read.error is not None:
                    self.problems.append((str(library), read.error.detail))
        return found


def loadable(
    paths: Mapping[str, str], regions: pd.DataFrame, elements: pd.DataFrame, gpus: Sequence[str] = ()
) -> Loadable:
    """Index the tables `regions` and `elements` of the libraries at `paths`, for the GPUs that a run saw.

    Without GPUs (the run never initialised CUDA) every element counts as loadable.
    """
    elements = elements.reset_index(drop=True)
    is_loadable = pd.Series(not gpus, elements.index, dtype=bool)
    is_chosen = is_loadable.copy()
    for gpu in gpus:
        fitted = targets.fit(elements, gpu)
        fits = fitted["is_loadable"].astype(bool)
        is_loadable |= fits
        is_chosen |= fits & _is_chosen(fitted)
    known = elements["library"].isin(list(paths))
    elements = elements.assign(is_loadable=is_loadable & known)
    outer = elements[is_chosen & known & elements["member"].isna()]
    chosen: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for library, region, element in outer[["library", "region", "element"]].itertuples(index=False, name=None):
        chosen[library, region].append((library, region, element))
    is_machine_code = outer["kind"].isin(["cubin", "concat", "unknown"])
    compiled = set(chosen) - set(outer[is_machine_code][["library", "region"]].itertuples(index=False, name=None))
    return Loadable(paths, regions, elements, {place: tuple(keys) for place, keys in chosen.items()}, compiled)


def _is_chosen(fitted: pd.DataFrame) -> Any:
    """Which loadable elements of each region the driver takes on the GPU that `fitted` is for.

    As measured (data/measured/driver-rule-h200): a cubin with suffix a before one without, any cubin before PTX, the
    highest PTX first, with suffix a before without. What was not measured is not decided: elements that are equal by
    this rule are all taken, and so are those whose inside is not known (concatenated, not understood).
    """
    known = {text: targets.parse(text) for text in fitted["target"].dropna().unique()}
    number = fitted["target"].map({text: t.number for text, t in known.items()}).fillna(0).astype(np.int64)
    is_arch = fitted["target"].map({text: t.suffix == "a" for text, t in known.items()}).fillna(False).astype(bool)
    fits = fitted["fit"].astype(str)
    rank = pd.Series(0, fitted.index, dtype=np.int64)
    rank = rank.mask(fits == "linked", 1)
    rank = rank.mask(fits == "ptx", 10 + 2 * number + is_arch)
    rank = rank.mask(fits.isin(["older_minor", "family", "same_target"]), (1 << 40) + number)
    rank = rank.mask(fits == "architecture", 1 << 50)
    rank = rank.where(fitted["member"].isna(), 0)
    best = rank.groupby([fitted["library"], fitted["region"]]).transform("max")
    return ((rank == best) & (rank > 0)) | fits.isin(["member", "unknown"])


def regions_of(places: Iterable[tuple[str, int]], elements: pd.DataFrame) -> pd.DataFrame:
    """The rows of `elements` in any of the regions `places`."""
    index = pd.MultiIndex.from_tuples(list(places), names=["library", "region"])
    return elements[pd.MultiIndex.from_frame(elements[["library", "region"]]).isin(index)]
