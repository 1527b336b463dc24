"""The stitching algorithm again, as slowly and plainly as its description reads: members in lists, nothing sorted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpubloat.memory.allocators import Driver

MIB = 1 << 20
CHUNK = 2 * MIB


@dataclass(eq=False)
class PBlock:
    address: int
    n: int
    mapping: tuple[int, int]  # address and chunks when it was made
    held: bool = False


@dataclass(eq=False)
class SBlock:
    address: int
    members: list[PBlock]
    stitched: bool
    used: int
    made: int = field(init=False)

    def __post_init__(self) -> None:
        self.made = self.used

    @property
    def n(self) -> int:
        return sum(p.n for p in self.members)

    @property
    def free(self) -> bool:
        return not any(p.held for p in self.members)


@dataclass
class Naive:
    """Large requests of one stream and pool only."""

    driver: Driver
    stitch_min: int = CHUNK
    stitch_limit: int | None = None
    p: list[PBlock] = field(default_factory=list)
    s: list[SBlock] = field(default_factory=list)
    live: dict[int, Any] = field(default_factory=dict)
    tick: int = 0

    def malloc(self, size: int) -> int | None:
        self.tick += 1
        n = -(-size // CHUNK)
        found = self.find(n)
        if found is None:
            self.release()
            found = self.find(n)
        if found is None:
            return None
        self.hold(found, True)
        self.live[found.address] = found
        if isinstance(found, SBlock) and found.stitched and found.made == self.tick:
            self.stitch_free()  # when a range is made: only then can there be too many
        return int(found.address)

    def hold(self, found: PBlock | SBlock, held: bool) -> None:
        if isinstance(found, SBlock) and held:
            found.used = self.tick
        for p in found.members if isinstance(found, SBlock) else [found]:
            assert p.held != held
            p.held = held

    def free(self, address: int) -> None:
        self.hold(self.live.pop(address), False)

    def find(self, n: int) -> PBlock | SBlock | None:
        free = [p for p in self.p if not p.held]
        if exact := [p for p in free if p.n == n]:  # S1
            return min(exact, key=lambda p: p.address)
        if ranges := [s for s in self.s if s.free and s.n == n]:
            return min(ranges, key=lambda s: s.address)
        if larger := [p for p in free if p.n > n]:  # S2
            best = min(larger, key=lambda p: (p.n, p.address))
            self.split(best, n)
            return best
        chosen: list[PBlock] = []
        for p in sorted(free, key=lambda p: (-p.n, p.address)):
            if p.n * CHUNK >= self.stitch_min and sum(c.n for c in chosen) < n:
                chosen.append(p)
        total = sum(c.n for c in chosen)
        if total < n:  # S4
            size = (n - total) * CHUNK
            address = self.driver.reserve(size)
            assert address is not None
            if not self.driver.map(address, size, n - total):
                self.driver.address_free(address, size)
                return None
            new = PBlock(address, n - total, (address, n - total))
            self.p.append(new)
            if not chosen:
                return new
            chosen.append(new)
        elif total > n:  # S3
            self.split(chosen[-1], chosen[-1].n - (total - n))
        address = self.driver.reserve(n * CHUNK)
        assert address is not None
        self.driver.alias(address, n * CHUNK, n)
        self.s.append(SBlock(address, chosen, True, self.tick))
        return self.s[-1]

    def split(self, p: PBlock, n: int) -> None:
        rest = PBlock(p.address + n * CHUNK, p.n - n, p.mapping)
        for s in self.s:
            if p in s.members:
                s.members.insert(s.members.index(p) + 1, rest)
        self.s.append(SBlock(p.address, [p, rest], False, self.tick))
        p.n = n
        self.p.append(rest)

    def destroy(self, s: SBlock) -> None:
        self.s.remove(s)
        if s.stitched:
            self.driver.unalias(s.address, s.n * CHUNK, s.n)
            self.driver.address_free(s.address, s.n * CHUNK)

    def stitch_free(self) -> None:
        if self.stitch_limit is None:
            return
        for s in sorted([s for s in self.s if s.stitched and s.free], key=lambda s: s.used):
            if sum(s.n for s in self.s if s.stitched) * CHUNK > self.stitch_limit:
                self.destroy(s)

    def release(self) -> None:
        for s in sorted(self.s, key=lambda s: (s.address, s.n)):
            if any(not p.held for p in s.members):
                self.destroy(s)
        for mapping in sorted({p.mapping for p in self.p if not p.held}):
            runs: list[list[PBlock]] = []
            for p in sorted([p for p in self.p if p.mapping == mapping and not p.held], key=lambda p: p.address):
                if runs and runs[-1][-1].address + runs[-1][-1].n * CHUNK == p.address:
                    runs[-1].append(p)
                else:
                    runs.append([p])
            for run in runs:
                n = sum(p.n for p in run)
                self.driver.unmap(run[0].address, n * CHUNK, n)
                self.p = [p for p in self.p if p not in run]
            if not any(p.mapping == mapping for p in self.p):
                self.driver.address_free(mapping[0], mapping[1] * CHUNK)
