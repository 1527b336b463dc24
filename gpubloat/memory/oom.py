"""Out of memory: what PyTorch's message says, and whether any allocator could have helped.

The numbers decide. A request larger than what is free plus what PyTorch holds unused fits nowhere, however memory is
arranged. One that is no larger than what is free was refused by a limit or by the driver. Between the two, the
memory was there, in pieces.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from gpubloat.errors import GpubloatError

VERDICTS = ("no_allocator_can_help", "driver_or_limit_refused", "fragmentation", "insufficient_data")
_LOOK = 1 << 16  # characters of a message that are looked at: the longest known have some thousand
# Repetitions are bounded, as a log may be anything. Thousands may be parted by commas; the end of a number that is
# written otherwise (1.024,00 or 1 024 or 1'024), or of a negative one, is not taken for a number.
_NUMBER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,6}|[0-9]{1,20})(?:\.[0-9]{1,20})?(?:e\+?[0-9]{1,3})?"
_SIZE = rf"(?<![0-9.,'\u2019_\-\u2212\u2013])(?<![0-9] )({_NUMBER}) ?(bytes?|[KMGTP]i?b?B)"
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_ABSURD = 1 << 56  # WSL reports other processes with -1: 17179869184 GiB
# Where each number stands, in all wordings since PyTorch 0.4; misspelt "capacty" until 2.1.
_FIELDS = {
    "request_bytes": (rf"tried to allocate {_SIZE}",),
    "capacity_bytes": (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capaci?ty"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"{_SIZE} free\b"),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unallocated_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached\b"),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
    "private_bytes": (rf"with {_SIZE} allocated in private pools",),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "allowed_bytes": (rf"{_SIZE} allowed\b",),
}
_OTHERS = re.compile(rf"(?<!this )Process [0-9]{{1,20}} has {_SIZE} memory in use", re.IGNORECASE)
_MENTION = re.compile(r"out of memory", re.IGNORECASE)
_MESSAGE = re.compile(r"out of memory(?: ?\([^()]{0,300}\))?\W{0,4}tried to allocate", re.IGNORECASE)
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\))")  # of terminals
_BACKENDS = re.compile(r"\b(CUDA|HIP|XPU|MPS|NPU|MUSA)\b[^.]{0,20}out of memory", re.IGNORECASE)

_SNAPSHOT = (
    "a snapshot says which blocks are in the way, and how much each of these helps: "
    "gpubloat memory record, then report and replay"
)


@dataclass(frozen=True, slots=True)
class Message:
    """The numbers of an out-of-memory message, in bytes; None where the message has none. Printed to two decimals."""

    backend: str
    gpu: int | None
    request_bytes: int | None
    capacity_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    unallocated_bytes: int | None  # reserved by PyTorch, and usable by it
    reserved_bytes: int | None
    private_bytes: int | None  # reserved for graphs and MemPools
    process_bytes: int | None
    other_processes_bytes: int | None
    allowed_bytes: int | None  # by set_per_process_memory_fraction


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of `VERDICTS`, why in a sentence, and what to try, the likeliest first.

    `short_bytes`: what the request exceeds all free and unused memory by; 0 if it does not; None if unknown.
    """

    verdict: str
    why: str
    advice: tuple[str, ...]
    short_bytes: int | None
    message: Message

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"advice": list(self.advice)}


def parse(text: str) -> Message:
    """The numbers of the first out-of-memory message in `text`, a traceback or a log for example.

    The first that says how much was asked for, if any does: other lines speak of running out of memory, too.

    Raises
    ------
    GpubloatError : there is no such message in it.
    """
    plain = re.sub(r"(?m)^[^\S\n]*>+", "", _ESCAPES.sub("", text))
    flat = re.sub(r"[\s|│]+", " ", plain)
    start = _MESSAGE.search(flat) or _MENTION.search(flat)
    if start is None:
        raise GpubloatError(
            "this is no out-of-memory message of PyTorch", "paste it from 'CUDA out of memory. Tried to allocate'"
        )
    begin = start.start()
    phrase_end = begin + len("out of memory")
    backend = _BACKENDS.search(flat[max(begin - 30, 0) : phrase_end])
    another = _MESSAGE.search(flat, start.end(), phrase_end + _LOOK)
    flat = flat[begin : another.start() if another else phrase_end + _LOOK]
    found = {name: _first(patterns, flat) for name, patterns in _FIELDS.items()}
    gpu = re.search(r"GPU ([0-9]{1,4})(?![0-9])", flat)
    others = [size for size in (_bytes(*m) for m in _OTHERS.findall(flat)) if size is not None]
    if found["unallocated_bytes"] is None and None not in (found["reserved_bytes"], found["allocated_bytes"]):
        found["unallocated_bytes"] = max((found["reserved_bytes"] or 0) - (found["allocated_bytes"] or 0), 0)
    if found["reserved_bytes"] is None and None not in (found["unallocated_bytes"], found["allocated_bytes"]):
        found["reserved_bytes"] = (found["unallocated_bytes"] or 0) + (found["allocated_bytes"] or 0)
    if found["process_bytes"] is None and found["reserved_bytes"] is not None:
        # In a container this process is listed by a number that it does not know as its own.
        own = [other for other in others if other >= found["reserved_bytes"]]
        if own:
            found["process_bytes"] = min(own)
            others.remove(min(own))
    return Message(
        backend=backend[1].upper() if backend else "unknown",
        gpu=int(gpu[1]) if gpu else None,
        other_processes_bytes=sum(others) if others else None,
        **found,
    )


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            return _bytes(match[1], match[2])
    return None


def _bytes(number: str, unit: str) -> int | None:
    size = float(number.replace(",", "")) * _UNITS[unit[0].upper()]
    return round(size) if size < _ABSURD else None


def diagnose(message: str | Message) -> Verdict:
    """Whether another allocator could have served the request; see the module's text for the rule.

    Numbers are taken as printed: what Windows and WSL allow beyond the capacity of the GPU is no error.
    """
    is_printed = isinstance(message, str)
    m = parse(message) if isinstance(message, str) else message
    if m.request_bytes is None:
        return Verdict("insufficient_data", "the message does not say how much was asked for", (), None, m)
    if m.free_bytes is None or m.unallocated_bytes is None:
        missing = "how much was free" if m.free_bytes is None else "how much PyTorch held unused"
        return Verdict("insufficient_data", f"the message does not say {missing}", (), None, m)
    free, unused, request = m.free_bytes, m.unallocated_bytes, m.request_bytes
    within = free
    if m.allowed_bytes is not None:
        used = m.reserved_bytes if m.reserved_bytes is not None else unused
        within = max(min(free, m.allowed_bytes - used - (m.private_bytes or 0)), 0)
    short = max(request - free - unused, 0)
    spilled = m.capacity_bytes is not None and (m.allocated_bytes or 0) > m.capacity_bytes
    note = "; more is allocated than the GPU has: the driver spills to system memory" if spilled else ""
    asked = f"{size(request)} were asked for, {size(free)} were free"
    if within < free:
        asked += f" ({size(within)} of them within the limit of {size(m.allowed_bytes or 0)})"
    if request <= within:
        why = f"{asked}: PyTorch did not need its {size(unused)} of unused memory; something else said no{note}"
        return Verdict("driver_or_limit_refused", why, _refused(m), short, m)
    if request > within + unused and request <= free:
        why = f"{asked}, but this process may have {size(m.allowed_bytes or 0)} in all{note}"
        return Verdict("driver_or_limit_refused", why, _refused(m), short, m)
    if is_printed and abs(request - within - unused) <= sum(map(_half_digit, (request, free, unused))):
        note += "; the numbers are printed too coarsely to be sure"
    if request > within + unused:
        more = request - within - unused
        why = f"{asked} and {size(unused)} unused in PyTorch's hands: {size(more)} too little, however arranged{note}"
        return Verdict("no_allocator_can_help", why, _none(m), max(more, short), m)
    why = (
        f"{asked} and {size(unused)} unused in PyTorch's hands: enough together, but not in one piece of "
        f"{size(request)} (at least {size(request - within)} of the unused bytes are needed){note}"
    )
    return Verdict("fragmentation", why, _pieces(m, is_printed), 0, m)


def _half_digit(n: int) -> float:
    """What printing two decimals can have taken from a number, or given it."""
    return 0.005 * next((unit for unit in (1 << 30, 1 << 20, 1 << 10) if n >= unit), 0)


def _refused(m: Message) -> tuple[str, ...]:
    advice = []
    if m.allowed_bytes is not None:
        advice.append(f"raise the limit of {size(m.allowed_bytes)}: torch.cuda.set_per_process_memory_fraction")
    advice.append(
        "look for a limit: torch.cuda.set_per_process_memory_fraction, another process that has ended since, a MIG "
        "slice or container limit, WDDM on Windows, a MemPool with its own allocator, or the limit on mappings "
        "(vm.max_map_count)"
    )
    return tuple(advice)


def _none(m: Message) -> tuple[str, ...]:
    advice = []
    if m.other_processes_bytes and m.other_processes_bytes > (1 << 29):
        advice.append(f"other processes hold {size(m.other_processes_bytes)} of this GPU")
    if m.private_bytes and m.private_bytes > (1 << 29):
        advice.append(f"graphs and MemPools hold {size(m.private_bytes)} that nothing else can use")
    advice.append("need less at once: smaller batch, recomputation, offload, lower precision, more GPUs")
    return tuple(advice)


def _pieces(m: Message, is_printed: bool) -> tuple[str, ...]:
    conf = {"HIP": "PYTORCH_HIP_ALLOC_CONF", "XPU": "PYTORCH_ALLOC_CONF"}.get(m.backend, "PYTORCH_CUDA_ALLOC_CONF")
    return (
        f"{conf}=expandable_segments:True, if it is not set already (not with max_split_size_mb)",
        "a stitching allocator",
        *([_SNAPSHOT] if is_printed else []),
    )


def size(n: int) -> str:
    """Bytes as PyTorch prints them: 1.50 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(n) >= unit:
            return f"{n / unit:.2f} {name}"
    return f"{n} bytes"
