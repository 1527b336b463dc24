"""Which GPU of NVML a number of CUDA means: the two count differently, and CUDA_VISIBLE_DEVICES hides some."""

from __future__ import annotations

import os
import sys
from typing import Any

from gpubloat.energy.meter import NoDevice


def handle_of(nvml: Any, index: int) -> Any:
    """NVML's handle of CUDA's device `index`.

    A program that has initialized CUDA through PyTorch tells the UUID. Otherwise CUDA_VISIBLE_DEVICES is read as CUDA
    reads it. NVML counts in the order of the bus; CUDA puts the fastest GPU first unless CUDA_DEVICE_ORDER says
    PCI_BUS_ID, so numbers of unlike GPUs are not guessed at.
    """
    uuid = _uuid_of_torch(index)
    if uuid is not None:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return NoDevice("NVML finds no GPU", "look at nvidia-smi")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [str(i) for i in range(len(handles))] if listed is None else [w.strip() for w in listed.split(",")]
    found: list[tuple[Any, str]] = []
    for word in words:  # as in CUDA, an entry that names no GPU ends the list
        handle = _named(nvml, word, handles)
        if handle is None:
            break
        found.append((handle, word))
    if not 0 <= index < len(found):
        shown = "" if listed is None else f" of those that CUDA_VISIBLE_DEVICES={listed} shows"
        return NoDevice(f"there is no GPU {index}{shown}", f"there are {len(found)}")
    handle, word = found[index]
    is_number = word.isdecimal() and len(handles) > 1
    if is_number and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        names = {text(nvml.nvmlDeviceGetName(h)) for h in handles}
        if len(names) > 1:
            return NoDevice(
                f"which of {', '.join(sorted(map(str, names)))} is GPU {index} cannot be known",
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name a UUID in CUDA_VISIBLE_DEVICES",
            )
    return handle


def _named(nvml: Any, word: str, handles: list[Any]) -> Any:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES names: a number, or the start of a UUID; None if it names none."""
    if word.isdecimal():
        return handles[int(word)] if int(word) < len(handles) else None
    if word.startswith("GPU-"):
        matching = [h for h in handles if str(text(nvml.nvmlDeviceGetUUID(h))).startswith(word)]
        return matching[0] if len(matching) == 1 else None
    if word.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(word)
        except nvml.NVMLError:
            return None
    return None


def _uuid_of_torch(index: int) -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or index >= torch.cuda.device_count():
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def whole(nvml: Any, handle: Any, index: int) -> Any:
    """The handle, or why its joules would be those of others too."""
    try:
        is_slice = bool(nvml.nvmlDeviceIsMigDeviceHandle(handle)) or bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except (nvml.NVMLError, AttributeError):
        is_slice = False  # a GPU without MIG does not answer
    if is_slice:
        return NoDevice(
            f"GPU {index} is divided by MIG, and its signals are those of the whole card",
            "use a GPU without MIG",
            "unsupported",
        )
    return handle


def text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
