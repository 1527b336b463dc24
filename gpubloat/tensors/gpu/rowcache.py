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

LENGTH_QUANTILE = 0.95  # of packed rows that a slot is long enough for, unless given


class RowCache:
    """N ways of slots of one size; row r goes to set ``r % n_sets``, the way used longest ago.

    Parameters
    ----------
    source : where rows come from; on a GPU it is pinned. capacity_bytes : of all slots. ways : slots of a set.
    slot_words : 32-bit words of a slot; rows that are longer are never kept. device : where the slots are.

    Raises
    ------
    GpubloatError : the capacity is less than one set. DeviceError, MissingToolError : as `PackedTensor.pin`.
    """

    def __init__(
        self, source: PackedTensor, capacity_bytes: int, ways: int = 8, slot_words: int | None = None,
        device: Any = "cuda",
    ) -> None:  # fmt: skip
        lengths = source.packed.row_words
        if slot_words is None:
            slot_words = max(1, int(np.quantile(lengths, LENGTH_QUANTILE, method="higher"))) if len(lengths) else 1
        self.source = source
        self.ways, self.slot_words = ways, slot_words
        self.n_sets = capacity_bytes // (4 * slot_words * ways)
        if self.n_sets < 1:
            raise GpubloatError(
                f"{capacity_bytes} bytes are less than one set of {ways} slots of {4 * slot_words} bytes",
                "give more, or fewer ways",
            )
        slots = empty((self.n_sets * ways, slot_words), torch.int32, device)
        self.slots, where = slots, slots.device
        self.lengths = torch.zeros(len(slots), dtype=torch.int32, device=where)
        self.row_words = torch.from_numpy(lengths.astype(np.int64)).to(where)
        self.tags = torch.full((self.n_sets, ways), -1, dtype=torch.int64, device=where)
        self.used = torch.zeros_like(self.tags)
        self.clock = 0
        self._hits = torch.zeros((), dtype=torch.int64, device=where)
        self._asked = 0
        self._from: Any
        self._cached: Any
        if where.type == "cuda":
            self._from = source.rows(where)
            self._cached = dataclasses.replace(
                self._from, address=slots.data_ptr(), n_words=slots.numel(), row_words=self.lengths, offsets=None,
                stride=slot_words, owner=slots,
            )  # fmt: skip
        else:
            self._from, self._cached = HostRows.of(source.packed), HostRows(source.packed, slots, self.lengths)

    def gather(self, indices: Any, out: Any = None) -> Any:
        """As `PackedTensor.gather`; rows that are in no slot are read from the source, and kept if a slot is free."""
        shape = (*indices.shape, *self.source.shape[1:])
        out = empty(shape, self.source.dtype, indices.device) if out is None else out
        wanted, at = torch.unique(indices.reshape(-1), return_inverse=True)
        if out.numel() == 0:
            return out
        n = self.source.packed.n_rows
        if n == 0 or (wanted.device.type == "cpu" and (int(wanted[0]) < 0 or int(wanted[-1]) >= n)):
            raise GpubloatError(f"an index is out of range: there are {n} rows")
        valid = wanted.clamp(0, n - 1)  # of wrong ones the decoder tells
        slot, hit = self._look_up(valid)
        hit &= valid == wanted
        self._hits += hit[at].sum()
        self._asked += len(at)
        self._insert(valid, slot, hit)
        flat, kept = out.view(len(at), -1), hit[at]
        for rows, numbers, chosen in ((self._cached, slot, kept), (self._from, wanted, ~kept)):
            places = chosen.nonzero().reshape(-1)
            if len(places):
                rows.decode(flat, numbers[at[places]], places)
        return out

    def _look_up(self, wanted: Any) -> tuple[Any, Any]:
        """(slot, whether it holds the row) for each wanted row."""
        self.clock += 1
        of_set = wanted % self.n_sets
        match = self.tags[of_set] == wanted[:, None]
        hit = match.any(1)
        slot = of_set * self.ways + match.int().argmax(1)
        self.used.view(-1)[slot[hit]] = self.clock
        return slot, hit

    def _insert(self, wanted: Any, slot: Any, hit: Any) -> None:
        """Keep rows that are in no slot: one for each set that has a slot not in use now. Updates `slot`, `hit`."""
        candidates = (~hit & (self.row_words[wanted] <= self.slot_words)).nonzero().reshape(-1)
        of_set, order = torch.sort(wanted[candidates] % self.n_sets, stable=True)
        first = torch.ones_like(of_set, dtype=torch.bool)
        first[1:] = of_set[1:] != of_set[:-1]
        new, of_set = candidates[order[first]], of_set[first]
        age, way = self.used[of_set].min(1)
        new, of_set, way = (part[age < self.clock] for part in (new, of_set, way))
        target = of_set * self.ways + way
        gpu_or_host = gpu.move_rows if self.slots.device.type == "cuda" else move_rows
        gpu_or_host(self._from, wanted[new], self.slots, target, self.lengths)
        self.tags.view(-1)[target] = wanted[new]
        self.used.view(-1)[target] = self.clock
        slot[new] = target
        hit[new] = True

    @property
    def n_held(self) -> int:
        return int((self.tags >= 0).sum())

    def stats(self) -> dict[str, int]:
        """Rows that were asked for: found in a slot, or not (waits for the GPU); rows held now; bytes of the slots."""
        hits = int(self._hits)
        return {
            "hits": hits,
            "misses": self._asked - hits,
            "held": self.n_held,
            "capacity_bytes": 4 * self.slots.numel(),
        }


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
