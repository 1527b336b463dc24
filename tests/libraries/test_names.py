"""Names of libraries, and which of them belong to the driver."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.libraries.names import is_driver, library_name, library_names


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/opt/v/lib/python3.12/site-packages/torch/lib/libtorch.so", "torch/lib/libtorch.so"),
        ("/usr/lib/python3/dist-packages/numpy/core.so", "numpy/core.so"),
        ("/v/site-packages/a.so", "a.so"),
        ("/v/site-packages/jax/site-packages/b/c.so", "b/c.so"),
        ("/v/site-packages/jax/dist-packages/c.so", "c.so"),
        ("/usr/lib/x86_64-linux-gnu/libz.so.1", "usr/lib/x86_64-linux-gnu/libz.so.1"),
        ("/usr/lib/site-packages", "usr/lib/site-packages"),
        ("/v/my-site-packages/a.so", "my-site-packages/a.so"),
        ("/home/me/env/lib/sub/libz.so", "lib/sub/libz.so"),
        ("/opt/cuda/lib64/lib/libz.so", "lib64/lib/libz.so"),
        ("/home/me/build/a.so", "build/a.so"),
        ("/site-packages/a.so", "a.so"),
        ("/a.so", "a.so"),
        ("", ""),
    ],
)
def test_library_name(path: str, name: str) -> None:
    assert library_name(path) == name


def test_two_libraries_of_one_name_have_their_paths() -> None:
    one, two, other = "/v/site-packages/p/a.so", "/w/site-packages/p/a.so", "/w/site-packages/p/b.so"
    assert library_names([one, other]) == {one: "p/a.so", other: "p/b.so"}
    assert library_names([one, two, other]) == {one: one, two: two, other: "p/b.so"}
    assert library_names(["/p/a.so", one]) == {"/p/a.so": "/p/a.so", one: one}
    assert library_names([]) == {}


PARTS = st.sampled_from(["a", "b", "site-packages", "dist-packages", "lib.so"])


@given(st.lists(st.lists(PARTS, min_size=1, max_size=6).map(lambda parts: "/" + "/".join(parts)), max_size=12))
def test_names_are_ends_of_their_paths(paths: list[str]) -> None:
    names = library_names(paths)
    assert set(names) == set(paths)
    assert len(set(names.values())) == len(names)
    assert all(path == name or path.endswith("/" + name) for path, name in names.items())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", True),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05", True),
        ("/usr/lib/wsl/lib/libcuda.so", True),
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", True),
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.580.95.05", True),
        ("/usr/lib/libcudadebugger.so.1", True),
        ("libcuda.so.1", True),
        ("/v/site-packages/nvidia/cu13/lib/libcudart.so.13", False),
        ("/v/site-packages/nvidia/cublas/lib/libcublas.so.12", False),
        ("/v/site-packages/nvidia/nvjitlink/lib/libnvJitLink.so.13", False),
        ("/v/site-packages/torch/lib/libtorch_cuda.so", False),
        ("/opt/libcuda.so.1/libother.so", False),
        ("/opt/libnvidia-tools/a.so", False),
        ("/v/my-libcuda.so", False),
        ("", False),
    ],
)
def test_libraries_of_the_driver(path: str, expected: bool) -> None:
    assert is_driver(path) == expected
