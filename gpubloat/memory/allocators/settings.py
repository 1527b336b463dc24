"""Settings of PyTorch's allocator, as PYTORCH_CUDA_ALLOC_CONF names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpubloat.errors import GpubloatError
from gpubloat.memory.allocators.base import DEFAULT_POOL, MIB

NO_LIMIT = 1 << 64  # larger than any size
N_DIVISIONS = 16  # intervals from 1 MiB to 64 GiB; below 1 MiB the first counts
_MIN_SEGMENT_MB, _MIN_ROUNDING_MB = 10, 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What changes where blocks go. Sizes in bytes; the defaults are PyTorch's."""

    max_split_size: int = NO_LIMIT
    roundup_power2_divisions: tuple[int, ...] = (0,) * N_DIVISIONS
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = 20 * MIB
    max_non_split_rounding: int = 20 * MIB
    expandable_segments: bool = False

    def changed(self) -> str:
        """``name=value,...`` of what is not the default, by PyTorch's names."""
        return changed(self)


def settings(
    *,
    max_split_size_mb: float | None = None,
    roundup_power2_divisions: int | str | Sequence[int] | Mapping[Any, int] = 0,
    garbage_collection_threshold: float = 0.0,
    large_segment_size_mb: float = 20,
    max_non_split_rounding_mb: float = 20,
    expandable_segments: bool | str = False,
) -> Settings:
    """Settings by PyTorch's names, checked as PyTorch checks them. Raises GpubloatError.

    `roundup_power2_divisions` is one number, 16 of them (from 1 MiB to 32 GiB and above), a mapping of MiB to numbers,
    or PyTorch's text ``[256:1,512:2,>:8]``.
    """
    split = NO_LIMIT
    if max_split_size_mb is not None and number("max_split_size_mb", max_split_size_mb) >= 0:
        split = int(max_split_size_mb * MIB)
    threshold = number("garbage_collection_threshold", garbage_collection_threshold)
    if not 0 <= threshold < 1:
        raise GpubloatError(f"garbage_collection_threshold={threshold}: a fraction below 1 is wanted")
    large = number("large_segment_size_mb", large_segment_size_mb)
    rounding = number("max_non_split_rounding_mb", max_non_split_rounding_mb)
    if not _MIN_SEGMENT_MB < large <= 1 << 20 or large != int(large):
        raise GpubloatError(f"large_segment_size_mb={large:g}: PyTorch wants a whole number above {_MIN_SEGMENT_MB}")
    if rounding < _MIN_ROUNDING_MB:
        raise GpubloatError(f"max_non_split_rounding_mb={rounding:g}: PyTorch wants no less than {_MIN_ROUNDING_MB}")
    if split < large * MIB:
        raise GpubloatError(f"max_split_size_mb={max_split_size_mb}: PyTorch wants no less than {large:g}, a segment")
    divided = _divisions(roundup_power2_divisions)
    for d in divided:
        if d < 0 or d & (d - 1):
            raise GpubloatError(f"roundup_power2_divisions={d}: a power of two, or 0, is wanted")
    expandable = truth("expandable_segments", expandable_segments)
    return Settings(split, divided, threshold, int(large * MIB), int(rounding * MIB), expandable)


def recorded(found: Mapping[str, Any]) -> Settings:
    """The settings of a snapshot (its `allocator_settings`); the defaults where it has none or they make no sense."""
    conf = found.get("PYTORCH_CUDA_ALLOC_CONF") or found.get("PYTORCH_ALLOC_CONF") or ""
    wanted: dict[str, Any] = dict(re.findall(r"(\w+):(\[[^\]]*\]|[^,\[\]]+)", conf)) if isinstance(conf, str) else {}
    known = {"max_split_size_mb", "large_segment_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold"}
    given: dict[str, Any] = {}
    for name in known & wanted.keys():
        try:
            given[name] = float(wanted[name])
        except ValueError:
            continue
    split = found.get("max_split_size")
    if isinstance(split, int) and not isinstance(split, bool):
        given["max_split_size_mb"] = None if split < 0 or split >= 1 << 62 else split / MIB
    threshold = found.get("garbage_collection_threshold")
    if isinstance(threshold, float):
        given["garbage_collection_threshold"] = threshold
    divided = found.get("roundup_power2_divisions")
    if isinstance(divided, Mapping):
        given["roundup_power2_divisions"] = divided
    given["expandable_segments"] = found.get("expandable_segments") is True
    try:
        return settings(**given)
    except GpubloatError:
        return settings(expandable_segments=given["expandable_segments"])


def lint(found: Mapping[str, Any] | Settings, pools: Iterable[str] = ()) -> list[str]:
    """One sentence for each pair of settings that do not go together.

    `found` is what a snapshot has as `allocator_settings`, or Settings; `pools` are the ids of pools that were used.
    """
    given = found if isinstance(found, Settings) else recorded(found)
    conf = "" if isinstance(found, Settings) else str(found.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    said = []
    if given.expandable_segments and given.max_split_size != NO_LIMIT:
        said.append(
            "max_split_size_mb with expandable_segments: free space above the limit is not used again, and what is "
            "reserved grows without end; set one of them (pytorch #123548, #119452)"
        )
    if given.expandable_segments and any(pool != DEFAULT_POOL for pool in pools):
        said.append(
            "expandable_segments with private pools: a MemPool that has an allocator of its own fails; switch "
            "expandable segments off around it (pytorch #147851)"
        )
    if given.expandable_segments and given.garbage_collection_threshold:
        said.append("garbage_collection_threshold with expandable_segments: their memory is never collected")
    if "cudaMallocAsync" in conf and ("expandable_segments" in conf or "max_split_size_mb" in conf):
        said.append("backend:cudaMallocAsync: the other settings are those of the native backend, and do nothing")
    return said


def changed(given: Any) -> str:
    """``name=value,...`` of the fields of a dataclass of settings that are not the default."""
    found = []
    for f in fields(given):
        value = getattr(given, f.name)
        if value == f.default:
            continue
        if isinstance(value, tuple) and len(set(value)) == 1:
            found.append(f"{f.name}={value[0]}")
        elif isinstance(value, tuple):
            found.append(f"{f.name}=[{','.join(f'{1 << i}:{d}' for i, d in enumerate(value))}]")
        elif isinstance(given, Settings) and type(value) is int:  # PyTorch counts its sizes in MiB
            found.append(f"{f.name}_mb={value / MIB:g}")
        else:
            found.append(f"{f.name}={value:g}" if isinstance(value, float) else f"{f.name}={value}")
    return ",".join(found)


def truth(name: str, value: object) -> bool:
    """`value` as True or False, or GpubloatError."""
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise GpubloatError(f"{name}={value}: true or false is wanted")
    return found


def number(name: str, value: object) -> float:
    """`value` as a finite number, or GpubloatError."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = float("nan")
    if not abs(found) < 1e15:
        raise GpubloatError(f"{name}={value}: a number is wanted")
    return found


def _divisions(given: int | str | Sequence[int] | Mapping[Any, int]) -> tuple[int, ...]:
    found = [0] * N_DIVISIONS
    wrong = GpubloatError(
        f"roundup_power2_divisions={given!r} is not understood", "give one number, or text such as [256:1,512:2,>:8]"
    )
    try:
        pairs: list[tuple[Any, Any]] | None = list(given.items()) if isinstance(given, Mapping) else None
        if isinstance(given, str) and not given.strip().isdecimal():
            pairs = [(part.split(":")[0], part.split(":")[1]) for part in given.strip("[] ").split(",")]
        if pairs is not None:
            last = -1
            for key, value in sorted(pairs, key=lambda p: NO_LIMIT if str(p[0]).strip() == ">" else int(p[0])):
                if str(key).strip() == ">":
                    found[last + 1 :] = [int(value)] * (N_DIVISIONS - last - 1)
                    continue
                index = min(max(int(key).bit_length() - 1, 0), N_DIVISIONS - 1)
                if last < 0:  # the first one also counts for what is smaller
                    found[:index] = [int(value)] * index
                found[index], last = int(value), index
            return tuple(found)
        if isinstance(given, Sequence) and not isinstance(given, str):
            if len(given) != N_DIVISIONS:
                raise wrong
            return tuple(int(d) for d in given)
        return (int(given),) * N_DIVISIONS  # type: ignore[arg-type]
    except (TypeError, ValueError, IndexError):
        raise wrong from None
