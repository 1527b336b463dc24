"""The campaign's model in two frameworks, small: matched by value, operator by operator, whoever comes first."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpubloat.energy.capture import capture
from gpubloat.energy.match.regions import match
from gpubloat.energy.workload import workload

SYSTEMS = Path(__file__).resolve().parents[2] / "campaigns" / "energy" / "systems"


@pytest.fixture(scope="module")
def captured() -> Any:
    for name in ("torch", "jax"):
        pytest.importorskip(name)
    found = {}
    for name in ("torch", "jax"):
        with workload(f"{SYSTEMS / f'gpt2_{name}.py'}:step") as one:
            inputs = sys.modules[one.fn.__module__].inputs
            found[name] = [capture(one.fn, *inputs(seed, small=True)) for seed in (0, 1)]
    return found


@pytest.mark.parametrize("order", [("torch", "jax"), ("jax", "torch")])
def test_the_same_model(captured: Any, order: tuple[str, str]) -> None:
    (a, a_again), (b, b_again) = (captured[name] for name in order)
    found = match(a, b, (a_again, b_again), 0.02)
    assert found.outputs_equal
    torch_side = order.index("torch")
    of_torch = captured["torch"][0]
    names = Counter[frozenset[str]]()
    for region in found.regions:
        own = (region.a_ops, region.b_ops)[torch_side]
        if region.a_ops and region.b_ops:
            names[frozenset(of_torch.ops[i].name.partition(".")[0] for i in own if not of_torch.ops[i].is_view)] += 1
    assert names[frozenset({"aten::native_layer_norm"})] >= 4
    assert names[frozenset({"aten::addmm"})] >= 4
    assert sum(n for key, n in names.items() if any("attention" in name for name in key)) == 2
