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

# why an element could be chosen ...
LOADABLE = (
    "same_target",
    "older_minor",  # same major, lower minor
    "architecture",  # suffix a, exact
    "family",  # suffix f
    "ptx",  # compiled at load, no cubin in the region fits
    "linked",  # LTO-IR, relocatable PTX, tile IR: input of a linker or compiler at run time
    "member",  # concatenated element with at least one loadable member
    "unknown",  # kind not understood: kept
)
# ... and why it could not
NEVER = (
    "other_major",
    "newer_minor",
    "other_architecture",  # suffix a
    "other_family",  # suffix f
    "newer_ptx",
    "ptx_not_needed",  # a cubin of the same region fits
)
FITS = LOADABLE + NEVER
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
    """The number of a GPU's compute capability: ``sm_90``, ``90`` and ``9.0`` all give 90.

    Raises GpubloatError on anything else; a GPU has no suffix (an sm_90 GPU also runs sm_90a code).
    """
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})|(\d{1,2})\.(\d)", text.strip())
    if match is None:
        raise GpubloatError(f"{text!r} is no GPU", "give its compute capability as sm_90, 90 or 9.0, without a suffix")
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
        some = (inner & fits.isin(LOADABLE)).groupby(element).transform("any").astype(bool)
        # Its members come behind it: the reason of the last one stands for all.
        fits = fits.mask(outer & ~some, fits.groupby(element).transform("last"))
        # Without its members (a table that cannot be read) nothing is known of it.
        fits = fits.mask(outer & ~inner.groupby(element).transform("any").astype(bool), "unknown")
    fits = fits.astype(elements["kind"].dtype)
    return elements.assign(fit=fits, is_loadable=fits.isin(LOADABLE))
