"""Which element of a region a GPU could be given: decisions worked by hand, the public bugs among them."""

from __future__ import annotations

import pandas as pd
import pytest

from gpubloat.errors import GpubloatError
from gpubloat.tables import targets
from gpubloat.tables.targets import FITS, LOADABLE, NEVER, Target, fit, gpu, parse


def kind_of(target: str) -> str:
    return {"sm": "cubin", "compute": "ptx", "lto": "lto_ir"}[target.partition("_")[0]]


def region(*wanted: str) -> pd.DataFrame:
    """One region; an element is written as its target, or as kind:target."""
    rows = []
    for number, text in enumerate(wanted):
        kind, _, target = text.rpartition(":")
        rows.append(("lib.so", 0, number, None, kind or kind_of(target), target or None))
    frame = pd.DataFrame(rows, columns=["library", "region", "element", "member", "kind", "target"])
    return frame.assign(member=frame["member"].astype("Int64"))


def fits(device: str, *wanted: str) -> list[str]:
    return fit(region(*wanted), device)["fit"].tolist()


def kept(device: str, *wanted: str) -> list[str]:
    table = fit(region(*wanted), device)
    return table.loc[table["is_loadable"], "target"].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sm_90a", Target("sm", 90, "a")),
        ("compute_120", Target("compute", 120, "")),
        ("lto_100f", Target("lto", 100, "f")),
        ("sm_4294967295", Target("sm", 4294967295, "")),
    ],
)
def test_targets_are_read(text: str, expected: Target) -> None:
    assert parse(text) == expected
    assert (expected.major, expected.minor) == (expected.number // 10, expected.number % 10)


@pytest.mark.parametrize("text", ["sm90", "sm_", "sm_90b", "sm_90aa", "ptx_90", "", "SM_90", "sm_90 ", "sm_-1"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(GpubloatError, match="is no GPU target"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "number"), [("sm_90", 90), ("90", 90), ("9.0", 90), (" 12.0 ", 120), ("sm90", 90), ("H100", 90)]
)
def test_gpus_are_read(text: str, number: int) -> None:
    assert gpu(text) == number


@pytest.mark.parametrize("text", ["sm_90a", "compute_90", "9", "9.00", "H900", "", "sm_9000", "90.0a"])
def test_what_is_no_gpu(text: str) -> None:
    with pytest.raises(GpubloatError, match="is no compute capability"):
        gpu(text)


# (GPU, target of the only element of its region, expected)
ALONE = [
    ("sm_80", "sm_80", "same_target"),
    ("sm_86", "sm_80", "older_minor"),
    ("sm_80", "sm_86", "newer_minor"),
    ("sm_90", "sm_89", "other_major"),
    ("sm_90", "sm_80", "other_major"),
    ("sm_80", "sm_90", "other_major"),
    ("sm_90", "sm_90a", "architecture"),
    ("sm_100", "sm_90a", "other_architecture"),
    ("sm_103", "sm_100a", "other_architecture"),
    ("sm_100", "sm_100f", "family"),
    ("sm_103", "sm_100f", "family"),
    ("sm_100", "sm_103f", "other_family"),
    ("sm_110", "sm_100f", "other_family"),
    ("sm_120", "sm_100f", "other_family"),
    ("sm_121", "sm_120f", "family"),
    ("sm_90", "compute_80", "ptx"),
    ("sm_90", "compute_90", "ptx"),
    ("sm_80", "compute_90", "newer_ptx"),
    ("sm_90", "compute_90a", "ptx"),
    ("sm_100", "compute_90a", "other_architecture"),
    ("sm_103", "compute_100f", "ptx"),
    ("sm_120", "compute_100f", "other_family"),
    ("sm_90", "lto_80", "linked"),
    ("sm_80", "lto_90", "newer_ptx"),
    ("sm_90", "relocatable_ptx:compute_80", "linked"),
    ("sm_90", "tile_ir:sm_80", "linked"),
    ("sm_90", "unknown:compute_999", "unknown"),
    ("sm_90", "unknown:", "unknown"),
    # Thor: CUDA 12 wrote sm_101, CUDA 13 writes sm_110, for the same GPU.
    ("sm_110", "sm_101", "same_target"),
    ("sm_101", "sm_110", "same_target"),
    ("sm_110", "sm_101a", "architecture"),
    ("sm_110", "sm_101f", "family"),
    ("sm_101", "sm_100", "other_major"),
    ("sm_103", "sm_101", "other_major"),
    ("sm_110", "compute_101", "ptx"),
    ("sm_103", "compute_101", "newer_ptx"),
]


@pytest.mark.parametrize(("device", "element", "expected"), ALONE)
def test_one_element_alone(device: str, element: str, expected: str) -> None:
    assert fits(device, element) == [expected]
    assert fit(region(element), device)["is_loadable"].tolist() == [expected in LOADABLE]


def test_every_reason_is_decided_by_some_case() -> None:
    decided = {expected for *_, expected in ALONE} | {"member", "ptx_not_needed"}
    assert decided == set(FITS)
    assert set(LOADABLE).isdisjoint(NEVER)


MAJORS = ("sm_50", "sm_60", "sm_70", "sm_80", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("sm_86", ["sm_80"]),
        ("sm_61", ["sm_60"]),
        ("sm_75", ["sm_70"]),
        ("sm_89", ["sm_80"]),
        ("sm_103", ["sm_100"]),
        ("sm_121", ["sm_120"]),
        ("sm_120", ["sm_120"]),
        ("sm_110", []),
        ("sm_130", ["compute_120"]),
    ],
)
def test_regions_with_one_cubin_per_major(device: str, expected: list[str]) -> None:
    """cupy/cupy 5508; ggml-org/llama-install.sh 125; huggingface/text-embeddings-inference 610 (B18, B19, B20).

    cuBLAS ships one cubin per major for many kernels: keeping only the exact target of the GPU breaks it.
    """
    assert kept(device, *MAJORS) == expected


def test_both_minors_of_a_major_are_kept() -> None:
    """ggml-org/llama-install.sh 125 (B19): on sm_86, sm_80 must stay also beside sm_86."""
    assert kept("sm_86", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90") == ["sm_80", "sm_86"]


def test_the_choice_is_made_in_each_region() -> None:
    """B19: one kernel has an sm_86 cubin, its neighbour only one for sm_80, a third only PTX."""
    table = pd.concat(
        [
            region("sm_80", "sm_86", "compute_86"),
            region("sm_80", "sm_90", "compute_80").assign(region=1),
            region("sm_90", "compute_70", "compute_80", "compute_90").assign(region=2),
            region("sm_86").assign(library="other.so"),
        ],
        ignore_index=True,
    )
    loaded = fit(table, "8.6").query("is_loadable")
    assert loaded[["library", "region", "target"]].values.tolist() == [
        ["lib.so", 0, "sm_80"],
        ["lib.so", 0, "sm_86"],
        ["lib.so", 1, "sm_80"],
        ["lib.so", 2, "compute_70"],
        ["lib.so", 2, "compute_80"],
        ["other.so", 0, "sm_86"],
    ]


def test_ptx_is_kept_where_no_cubin_crosses_to_the_major() -> None:
    """sm_86 + compute_80 on sm_90: the cubin is of another major, so the PTX is what loads."""
    assert kept("sm_90", "sm_86", "compute_80") == ["compute_80"]
    assert fits("sm_90", "sm_86", "compute_80") == ["other_major", "ptx"]


def test_several_ptx_versions() -> None:
    """gpgpu-sim/gpgpu-sim_distribution 111 and 93 (B17): of several PTX in one region, no newer one is taken."""
    assert kept("sm_80", "compute_50", "compute_70", "compute_80", "compute_90") == [
        "compute_50",
        "compute_70",
        "compute_80",
    ]
    assert fits("sm_80", "sm_80", "compute_70", "compute_90") == ["same_target", "ptx_not_needed", "newer_ptx"]


def test_twins_of_one_number() -> None:
    assert fits("sm_90", "sm_90", "sm_90a") == ["same_target", "architecture"]
    assert fits("sm_100", "sm_100", "sm_100a", "sm_100f", "sm_103a", "sm_103f") == [
        "same_target",
        "architecture",
        "family",
        "other_architecture",
        "other_family",
    ]
    assert kept("sm_103", "sm_100", "sm_100a", "sm_100f", "sm_103a") == ["sm_100", "sm_100f", "sm_103a"]


def test_a_cubin_for_another_architecture_does_not_replace_ptx() -> None:
    assert kept("sm_100", "sm_90a", "compute_90") == ["compute_90"]
    assert kept("sm_100", "sm_90a", "compute_90a") == []


def test_input_of_the_linker_is_kept_beside_a_cubin() -> None:
    assert fits("sm_90", "sm_90", "lto_90", "compute_90") == ["same_target", "linked", "ptx_not_needed"]


def concat(*members: str, element: int = 0) -> pd.DataFrame:
    inner = region(*members).assign(element=element, member=pd.array(range(len(members)), "Int64"))
    outer = region("concat:").assign(element=element)
    return pd.concat([outer, inner], ignore_index=True)


def test_a_concatenated_element_is_loadable_with_its_members() -> None:
    table = pd.concat([concat("sm_80", "sm_90"), concat("sm_100f", element=1)], ignore_index=True)
    assert fit(table, "sm_90")["fit"].tolist() == [
        "member",
        "other_major",
        "same_target",
        "other_family",
        "other_family",
    ]


def test_a_concatenated_element_of_unknown_content_is_kept() -> None:
    table = pd.concat([concat(), region("sm_90", "compute_90").assign(element=[1, 2])], ignore_index=True)
    found = fit(table, "sm_90")
    assert found["fit"].tolist() == ["unknown", "same_target", "ptx_not_needed"]
    assert found["is_loadable"].tolist() == [True, True, False]


def test_a_cubin_inside_a_concatenated_element_replaces_ptx() -> None:
    table = pd.concat([concat("sm_80", "sm_90"), region("compute_90").assign(element=1)], ignore_index=True)
    assert fit(table, "sm_90")["fit"].tolist()[-1] == "ptx_not_needed"


def test_the_order_and_index_of_rows_do_not_matter() -> None:
    table = region("sm_80", "compute_80", "sm_90", "compute_90")
    shuffled = table.sample(frac=1, random_state=1)
    found = fit(shuffled, "sm_90")
    assert found.index.tolist() == shuffled.index.tolist()
    pd.testing.assert_frame_equal(found.sort_index(), fit(table, "sm_90"))


def test_nothing_in_nothing_out() -> None:
    assert len(fit(region("sm_90").iloc[:0], "sm_90")) == 0


def test_no_region_loses_everything_that_could_load() -> None:
    """For every GPU and region: something is kept exactly if some element alone would load."""
    devices = ["sm_50", "sm_61", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_121"]
    pool = ["sm_60", "sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100f", "sm_103a", "compute_75", "compute_90a"]
    regions = [pool[-size:] for size in range(1, len(pool) + 1)] + [[target] for target in pool]
    table = pd.concat([region(*r).assign(region=n) for n, r in enumerate(regions)], ignore_index=True)
    for device in devices:
        found = fit(table, device)
        found = found[found["is_loadable"]]
        loadable = [set(found.loc[found["region"] == n, "target"]) for n in range(len(regions))]
        alone = set().union(*loadable[len(pool) :])
        for chosen, together in zip(regions, loadable, strict=True):
            assert bool(together) == bool(alone & set(chosen))
            assert together <= alone


def test_module_lists_are_consistent() -> None:
    assert targets.FITS == targets.LOADABLE | targets.NEVER
    assert not set(targets.LOADABLE) & set(targets.NEVER)
    assert all(targets.FITS.values())
    assert set(targets.GPUS.values()) <= set(targets.KNOWN)
