"""Settings are set while a block runs and always put back; a sweep keeps the one that closes the gap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpubloat.energy.causes.switches import JAX, TORCH, Switch, applying, closing, named, parsed, sweep

ATTRIBUTES = {
    "matmul.allow_tf32": ("cuda.matmul", "allow_tf32", True),
    "cudnn.allow_tf32": ("cudnn", "allow_tf32", True),
    "cudnn.benchmark": ("cudnn", "benchmark", True),
    "matmul.allow_bf16_reduced_precision_reduction": ("cuda.matmul", "allow_bf16_reduced_precision_reduction", False),
}


def owner(torch: Any, path: str) -> Any:
    found = torch.backends
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("fails", [False, True])
def test_setting_is_put_back(name: str, fails: bool) -> None:
    torch = pytest.importorskip("torch")
    path, attribute, value = ATTRIBUTES[name]
    place = owner(torch, path)
    before = getattr(place, attribute), getattr(place, "fp32_precision", None)
    try:
        with named(name).on():
            assert getattr(place, attribute) is value
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert (getattr(place, attribute), getattr(place, "fp32_precision", None)) == before


def test_tf32_of_a_program_with_the_new_setting() -> None:
    """PyTorch refuses to read the old one then."""
    torch = pytest.importorskip("torch")
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this PyTorch has the old setting only")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        with named("matmul.allow_tf32").on():
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before


def test_attention_backends() -> None:
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 2, 8, 4)
    state = lambda: (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())  # noqa: E731
    before = state()
    with named("sdpa.math").on():
        assert state() == (False, True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert state() == before


def test_channels_last_keeps_values_and_memory() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Conv2d(3, 4, 2)
    x, labels = torch.randn(2, 3, 5, 6), torch.arange(4)
    expected = layer(x)
    places = x.data_ptr(), layer.weight.data_ptr()
    with named("channels_last").on(layer, {"x": x}, labels):
        assert x.stride()[1] == 1
        assert layer.weight.stride()[1] == 1
        torch.testing.assert_close(layer(x), expected)
    assert (x.data_ptr(), layer.weight.data_ptr()) == places
    assert x.is_contiguous()


def test_library_of_solvers_is_put_back() -> None:
    torch = pytest.importorskip("torch")
    before = torch.backends.cuda.preferred_linalg_library()
    results = sweep(lambda: 1.0, [named("linalg.cusolver"), named("linalg.magma")])
    assert len(results) == 2
    assert torch.backends.cuda.preferred_linalg_library() == before


def fake(name: str, joules: float, meter: dict[str, Any]) -> Switch:
    """A switch under which the meter reads these joules."""
    from contextlib import contextmanager

    @contextmanager
    def setter(args: tuple[Any, ...]) -> Any:
        before = meter["now"]
        meter["now"] = joules
        meter["args"] = args
        try:
            yield
        finally:
            meter["now"] = before

    return Switch(name, name, frozenset(), False, frozenset(), setter)


@given(st.lists(st.floats(1, 1e6), max_size=6), st.floats(1, 1e6), st.floats(1, 1e6))
def test_sweep_finds_the_lowest(joules: list[float], slow: float, fast: float) -> None:
    meter: dict[str, Any] = {"now": slow}
    results = sweep(lambda: meter["now"], [fake(str(i), j, meter) for i, j in enumerate(joules)], (7,))
    assert meter["now"] == slow
    assert [result for _, result in results] == sorted(joules)
    best = closing(results, slow, fast)
    closes = bool(joules) and slow > fast and slow - min(joules) >= 0.5 * (slow - fast)
    assert (best is not None) == closes
    if best is not None:
        assert joules[int(best.name)] == min(joules)
        assert meter["args"] == (7,)


def test_what_refuses_to_run_comes_last_and_is_put_back() -> None:
    meter: dict[str, Any] = {"now": 5.0}

    def run() -> float:
        if meter["now"] == 1.0:
            raise RuntimeError("no available kernel")
        return float(meter["now"])

    results = sweep(run, [fake("bad", 1.0, meter), fake("good", 2.0, meter), *JAX])
    assert [(switch.name, result) for switch, result in results] == [("good", 2.0), ("bad", float("inf"))]
    assert meter["now"] == 5.0


def test_other_errors_are_not_swallowed() -> None:
    meter: dict[str, Any] = {"now": 5.0}

    def run() -> float:
        raise KeyError

    with pytest.raises(KeyError):
        sweep(run, [fake("bad", 1.0, meter)])
    assert meter["now"] == 5.0


def test_which_apply() -> None:
    def of(operator: str, *dtypes: str) -> set[str]:
        return {switch.name for switch in applying([operator], dtypes)}

    assert of("aten::addmm.default", "fp32") == {"matmul.allow_tf32"}
    assert of("aten::bmm.default", "bf16") == {"matmul.allow_bf16_reduced_precision_reduction"}
    assert of("aten::convolution.default", "fp32") == {"cudnn.allow_tf32", "cudnn.benchmark", "channels_last"}
    assert all(name.startswith("sdpa.") for name in of("aten::_scaled_dot_product_efficient_attention.default"))
    assert of("aten::tanh.default") == set()
    assert of("jax::dot_general", "fp32") == {"jax.matmul", "jax.autotune"}
    assert all(switch.setter is not None for switch in TORCH)


def test_advice_cannot_be_set() -> None:
    with pytest.raises(ValueError, match="before the program starts"):
        JAX[1].on()


def test_recorded_state() -> None:
    assert parsed("matmul.allow_tf32=True, cudnn.benchmark=False") == {
        "matmul.allow_tf32": "True",
        "cudnn.benchmark": "False",
    }
    assert parsed("") == {}
