"""Fixture of pytest: a test fails if a function takes more energy than it used to.

pytest loads this file in every project of an environment that gpubloat is installed in, so it imports nothing else of
gpubloat, or of the GPU, before a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def assert_no_energy_regression() -> Callable[..., None]:
    """``assert_no_energy_regression(fn, baseline, *args, most_frac=0.05)``: see `regression.regression`.

    Skips the test, with the reason, where energy cannot be measured.
    """

    def check(fn: Callable[..., Any], baseline: Callable[..., Any], *args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        from gpubloat.energy.regression import regression

        found = regression(fn, baseline, *args, **options)
        if found.skipped:
            pytest.skip(found.skipped)
        if found.failed:
            pytest.fail(found.failed, pytrace=False)

    return check
