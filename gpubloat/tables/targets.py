"""GPU targets: their spelling, and which element of a fatbin region the driver could choose on a given GPU.

Rules (CUDA C++ Programming Guide, "Compute Capabilities" and "Compilation with NVCC"; NVIDIA's Blackwell
compatibility guide for the suffixes): a cubin runs on GPUs of the same major and of the same or a later minor; a
cubin with suffix `a` on that exact GPU only; with suffix `f` on the same family, from its minor upwards; PTX is
compiled for any GPU that is not older. The driver loads one image per region and prefers a cubin that fits to PTX.
Which of several fitting cubins it prefers is not documented, so all of them count as loadable.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pandas as pd

from gpubloat.errors import GpubloatError

# Why an element could be chosen ...
LOADABLE = {
    "same_target": "machine code for exactly this GPU",
    "older_minor": "machine code for an earlier minor of the same major",
    "architecture": "machine code with suffix a, for exactly this GPU",
    "family": "machine code with suffix f, for this GPU's family",
    "ptx": "PTX, compiled at load: no machine code beside it fits",
    "linked": "LTO-IR, relocatable PTX or tile IR: linked or compiled at run time",
    "member": "a concatenated element with a member that fits",
    "unknown": "not understood, so kept",
}
# ... and why it could not.
NEVER = {
    "other_major": "machine code for another major version",
    "newer_minor": "machine code for a later minor",
    "other_architecture": "suffix a, for another GPU",
    "other_family": "suffix f, for another family or a later minor",
    "newer_ptx": "PTX or LTO-IR for a newer GPU",
    "ptx_not_needed": "PTX beside machine code that fits",
}
FITS = LOADABLE | NEVER
GPUS = {
    "P100": 60, "V100": 70, "T4": 75, "A100": 80, "A30": 80, "A10": 86, "A40": 86, "RTX3090": 86, "L4": 89, "L40": 89,
    "L40S": 89, "RTX4090": 89, "H100": 90, "H200": 90, "GH200": 90, "B200": 100, "GB200": 100, "B300": 103,
    "RTX5090": 120,
}  # fmt: skip
# Compute capabilities that GPUs have (NVIDIA, "CUDA GPU Compute Capability").
KNOWN = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
_CUBIN_FITS = ("same_target", "older_minor", "architecture", "family")


class Target(NamedTuple):
    """A target as the tables spell it: ``sm_90a`` is ('sm', 90, 'a')."""

    prefix: str
    number: int
    suffix: str

    @property
    def major(self) -> int:
        return self.number // 10

    @property
    def minor(self) -> int:
        return self.number % 10


def parse(text: str) -> Target:
    """Read ``sm_90a``, ``compute_120`` or ``lto_90``; raise GpubloatError on anything else."""
    match = re.fullmatch(r"(sm|compute|lto)_(\d{1,10})([af]?)", text)
    if match is None:
        raise GpubloatError(f"{text!r} is no GPU target", "write it as sm_90, sm_90a or compute_120")
    return Target(match[1], int(match[2]), match[3])


def gpu(text: str) -> int:
    """The number of a GPU's compute capability: ``sm_90``, ``sm90``, ``90``, ``9.0`` and ``H100`` all give 90.

    Raises GpubloatError on anything else; a GPU has no suffix (an sm_90 GPU also runs sm_90a code).
    """
    named = GPUS.get(text.upper().replace("NVIDIA", "").replace(" ", ""))
    if named:
        return named
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})|(\d{1,2})\.(\d)", text.strip())
    if match is None:
        hint = "write it as sm_90, 90 or 9.0, without a suffix, or as one of " + ", ".join(GPUS)
        raise GpubloatError(f"{text!r} is no compute capability of a GPU", hint)
    return int(match[1]) if match[1] else int(match[2]) * 10 + int(match[3])


def _alone(kind: str, target: str, number: int) -> str:
    """The fit of one element by itself, before the rest of its region is looked at."""
    if kind == "unknown":
        return "unknown"
    if kind == "concat":
        return "member"
    _, code, suffix = parse(target)
    # CUDA 13 renamed sm_101 (Thor) to sm_110: code built for either runs there.
    code, number = (110 if n == 101 else n for n in (code, number))
    same_major = code // 10 == number // 10
    if suffix == "a" and code != number:
        return "other_architecture"
    if suffix == "f" and not (same_major and code <= number):
        return "other_family"
    if kind == "cubin":
        if suffix:
            return "architecture" if suffix == "a" else "family"
        if code == number:
            return "same_target"
        if not same_major:
            return "other_major"
        return "older_minor" if code < number else "newer_minor"
    if code > number:
        return "newer_ptx"
    return "ptx" if kind == "ptx" else "linked"


def fit(elements: pd.DataFrame, target: str) -> pd.DataFrame:
    """Return `elements` with the columns `fit` and `is_loadable` for the GPU `target`.

    Parameters
    ----------
    elements : table `elements`; the choice is made inside each (library, region).
    target : the GPU, as `gpu` reads it.
    """
    number = gpu(target)
    pairs = elements[["kind", "target"]].drop_duplicates()
    known = {(k, t): _alone(k, t, number) for k, t in pairs.itertuples(index=False)}
    fits = pd.Series([known[p] for p in zip(elements["kind"], elements["target"], strict=True)], index=elements.index)
    where = [elements["library"], elements["region"]]
    has_cubin = fits.isin(_CUBIN_FITS).groupby(where).transform("any").astype(bool)
    fits = fits.mask((fits == "ptx") & has_cubin, "ptx_not_needed")
    outer = elements["kind"] == "concat"
    if outer.any():
        inner = elements["member"].notna()
        element = [*where, elements["element"]]
        some = (inner & fits.isin(list(LOADABLE))).groupby(element).transform("any").astype(bool)
        # Its members come behind it: the reason of the last one stands for all.
        fits = fits.mask(outer & ~some, fits.groupby(element).transform("last"))
        # Without its members (a table that cannot be read) nothing is known of it.
        fits = fits.mask(outer & ~inner.groupby(element).transform("any").astype(bool), "unknown")
    fits = fits.astype(elements["kind"].dtype)
    return elements.assign(fit=fits, is_loadable=fits.isin(list(LOADABLE)))
