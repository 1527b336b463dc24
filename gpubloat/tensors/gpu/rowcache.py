"""A cache of packed rows in a GPU's memory: rows stay packed there, so that more of them fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gpubloat.errors import GpubloatError
from gpubloat.tensors.gpu import device as gpu
from gpubloat.tensors.gpu.torchuse import PackedTensor, as_bytes, empty, torch
from gpubloat.tensors.packing import Packed, _read_only
from gpubloat.tensors.rowbits import decode

LENGTH_QUANTILE = 0.95  # of packed rows that a short slot is long enough for


class RowCache:
    """Slots for packed rows: most as long as nearly all rows need, some as long as the longest, for those beyond.

    Without long slots a row that does not shrink could never be kept, however often it is asked for.

    Parameters
    ----------
    source : where rows come from; on a GPU it is pinned. capacity_bytes : of all slots. ways : slots of a set.
    slot_words : 32-bit words of all slots, if there shall be one length only; longer rows are never kept. device :
        where the slots are.

    Raises
    ------
    GpubloatError : the capacity is less than one set. DeviceError, MissingToolError : as `PackedTensor.pin`.
    """

    def __init__(
        self, source: PackedTensor, capacity_bytes: int, ways: int = 8, slot_words: int | None = None,
        device: Any = "cuda",
    ) -> None:  # fmt: skip
        lengths = source.packed.row_words
        if ways < 1 or (slot_words is not None and slot_words < 1):
            what, number = ("ways", ways) if ways < 1 else ("slot_words", slot_words)
            raise GpubloatError(f"{what} is {number}", "1 or more")
        self.source = source
        sizes = _sizes(lengths, capacity_bytes // (4 * ways), slot_words)
        if min(sizes.values()) < 1:
            raise GpubloatError(
                f"{capacity_bytes} bytes are less than one set of {ways} slots of {4 * min(sizes)} bytes",
                "give more, or fewer ways",
            )
        self.kinds = [_Slots(source, n_sets, ways, words, device) for words, n_sets in sorted(sizes.items())]
        where = self.kinds[0].slots.device
        self._row_words = torch.from_numpy(lengths.astype(np.int64)).to(where)
        self._bounds = torch.tensor([kind.slot_words for kind in self.kinds], device=where)
        self._clock = 0
        self._hits = torch.zeros((), dtype=torch.int64, device=where)
        self._asked = 0
        self._from: Any = source.rows(where) if where.type == "cuda" else HostRows.of(source.packed)

    def gather(self, indices: Any, out: Any = None) -> Any:
        """As `PackedTensor.gather`; rows that are in no slot are read from the source, and kept if a slot is free."""
        out = self.source.room(indices, out)
        wanted, at, times = torch.unique(indices.reshape(-1).long(), return_inverse=True, return_counts=True)
        if out.numel() == 0:
            return out
        n = self.source.packed.n_rows
        if n == 0 or (wanted.device.type == "cpu" and (int(wanted[0]) < 0 or int(wanted[-1]) >= n)):
            raise GpubloatError(f"an index is out of range: there are {n} rows")
        self._clock += 1
        self._asked += len(at)
        in_range = (wanted >= 0) & (wanted < n)  # wrong ones go to the decoder, which tells
        kind = torch.bucketize(self._row_words[wanted.clamp(0, n - 1)], self._bounds)
        kind[~in_range] = len(self.kinds)
        slot, hit, held = torch.zeros_like(wanted), torch.zeros_like(in_range), torch.zeros_like(in_range)
        for number, slots in enumerate(self.kinds):
            mine = (kind == number).nonzero().reshape(-1)
            slot[mine], hit[mine], held[mine] = slots.ask(self._from, wanted[mine], times[mine], self._clock)
        self._hits += hit[at].sum()
        flat, kind = out.view(len(at), -1), torch.where(held, kind, len(self.kinds))[at]
        for number, rows in enumerate([*(slots.rows for slots in self.kinds), self._from]):
            places = (kind == number).nonzero().reshape(-1)
            if len(places):
                rows.decode(flat, (wanted if rows is self._from else slot)[at[places]], places)
        return out

    @property
    def n_held(self) -> int:
        return sum(int((slots.tags >= 0).sum()) for slots in self.kinds)

    def stats(self) -> dict[str, int]:
        """Rows that were asked for: found in a slot, or not (waits for the GPU); rows held now; bytes of the slots."""
        hits = int(self._hits)
        return {
            "hits": hits,
            "misses": self._asked - hits,
            "held": self.n_held,
            "capacity_bytes": sum(4 * slots.slots.numel() for slots in self.kinds),
        }


def _sizes(lengths: Any, way_words: int, slot_words: int | None) -> dict[int, int]:
    """Words of a slot -> sets. way_words : that one way of all sets has.

    Long slots get the share of the bytes that long rows have, one set at least. There is one length if it is given, if
    all rows are about as long, or if there is no room for two.
    """
    short = slot_words
    if short is None:
        short = max(1, int(np.quantile(lengths, LENGTH_QUANTILE, method="higher"))) if len(lengths) else 1
        longest = max(short, int(lengths.max(initial=0)))
        beyond = int((lengths > short).sum()) * longest
        if beyond:
            share = beyond / (beyond + int((lengths <= short).sum()) * short)
            n_long = max(1, round(share * way_words / longest))
            n_short = (way_words - n_long * longest) // short
            if n_short > 0:
                return {short: n_short, longest: n_long}
    return {short: way_words // short}


class _Slots:
    """Sets of slots of one length: row r goes to set ``r % n_sets``, to the way used longest ago."""

    def __init__(self, source: PackedTensor, n_sets: int, ways: int, slot_words: int, device: Any) -> None:
        self.n_sets, self.ways, self.slot_words = n_sets, ways, slot_words
        self.slots = empty((n_sets * ways, slot_words), torch.int32, device)
        where = self.slots.device
        self.lengths = torch.zeros(len(self.slots), dtype=torch.int32, device=where)
        self.tags = torch.full((n_sets, ways), -1, dtype=torch.int64, device=where)
        self.used = torch.zeros_like(self.tags)
        self.rows: Any
        if where.type == "cuda":
            self.rows = dataclasses.replace(
                source.rows(where), address=self.slots.data_ptr(), n_words=self.slots.numel(), row_words=self.lengths,
                offsets=None, stride=slot_words, owner=self.slots,
            )  # fmt: skip
        else:
            self.rows = HostRows(source.packed, self.slots, self.lengths)

    def ask(self, source: Any, wanted: Any, times: Any, clock: int) -> tuple[Any, Any, Any]:
        """(slot, whether it held the row, whether it does now) for each wanted row; none is there twice.

        Of rows that are in no slot, each set that has a slot not in use now keeps the one asked for most (`times`).
        """
        of_set = wanted % self.n_sets
        match = self.tags[of_set] == wanted[:, None]
        hit = match.any(1)
        slot = of_set * self.ways + match.int().argmax(1)
        self.used.view(-1)[slot[hit]] = clock
        candidates = (~hit).nonzero().reshape(-1)
        candidates = candidates[torch.argsort(times[candidates], descending=True, stable=True)]
        of_set, order = torch.sort(wanted[candidates] % self.n_sets, stable=True)
        first = torch.ones_like(of_set, dtype=torch.bool)
        first[1:] = of_set[1:] != of_set[:-1]
        new, of_set = candidates[order[first]], of_set[first]
        age, way = self.used[of_set].min(1)
        new, of_set, way = (part[age < clock] for part in (new, of_set, way))
        target = of_set * self.ways + way
        self.tags.view(-1)[target] = -1  # if moving ends early, no slot claims what it does not hold
        gpu_or_host = gpu.move_rows if self.slots.device.type == "cuda" else move_rows
        gpu_or_host(source, wanted[new], self.slots, target, self.lengths)
        self.tags.view(-1)[target] = wanted[new]
        self.used.view(-1)[target] = clock
        held = hit.clone()
        slot[new], held[new] = target, True
        return slot, hit, held


class HostRows:
    """What `device.Rows` is, for the CPU: packed rows in tensors, decoded by the reference."""

    def __init__(self, packed: Packed, words: Any, row_words: Any, offsets: Any = None) -> None:
        self.packed, self.words, self.row_words = packed, words.reshape(-1), row_words
        n = len(row_words)
        self.offsets = np.arange(n, dtype=np.uint64) * np.uint64(words.shape[-1]) if offsets is None else offsets

    @classmethod
    def of(cls, packed: Packed) -> HostRows:
        words, row_words = (torch.from_numpy(a.astype("<i4")) for a in (packed.words, packed.row_words))
        return cls(packed, words, row_words, packed.offsets)

    def decode(self, out: Any, indices: Any, places: Any) -> None:
        codebook = self.packed.codebook
        rows = np.empty((len(indices), len(codebook.mask)), codebook.mask.dtype)
        words, row_words = (_read_only(a.numpy().view("<u4")) for a in (self.words, self.row_words))
        bad = decode(words, codebook.plan(), row_words, _read_only(self.offsets), indices.numpy(), rows)
        if bad >= 0:
            raise GpubloatError(f"row {bad} of the packed tensor is damaged: its length is not what its flags say")
        as_bytes(out).view(len(out), -1)[places] = torch.from_numpy(rows.view(np.uint8))


def move_rows(source: HostRows, indices: Any, slots: Any, places: Any, lengths: Any) -> None:
    """`device.move_rows` for the CPU."""
    for row, slot in zip(indices.tolist(), places.tolist()):
        begin, n = int(source.offsets[row]), int(source.row_words[row])
        slots[slot, :n] = source.words[begin : begin + n]
        lengths[slot] = n
