"""An engine and a meter on one virtual clock: what work takes, in seconds and watts, is given, so joules are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from gpubloat.energy.engines import AS_CALLED, IN_A_GRAPH, Around, Ran, Work
from gpubloat.energy.recording import Simulated, Steps, VirtualClock
from tests.energy.cards import IDLE_W

CALLS = 7  # of one run of prepared work


class Costs:
    """A function that takes `call_s` seconds and `watts`; the host spends `host_s` of CPU time on a call."""

    def __init__(self, call_s: float, watts: float, host_s: float = 0.0, *, waits: bool = False) -> None:
        self.call_s = call_s
        self.watts = watts
        self.host_s = host_s
        self.waits = waits  # for the GPU, so that it cannot be captured

    @property
    def call_j(self) -> float:
        return self.call_s * self.watts

    def __call__(self) -> None:
        pass


class Rig:
    """The engine. meter : a simulated card; what it really drew is `power`.

    noise : standard deviation of watts from block to block, relative; drift : relative growth of watts in a second.
    cost : of functions that are no `Costs`.
    """

    def __init__(
        self, *, noise: float = 0.0, drift: float = 0.0, seed: int = 0, cost: Costs | None = None, **card: Any
    ) -> None:
        self.clock = VirtualClock()
        self.power = Steps(IDLE_W)
        self.meter = Simulated(self.power, self.clock, **card)
        self.n_releases = 0
        self.n_runs = 0
        self.fails: Callable[[Work], None] = lambda _: None
        self._noise, self._drift, self._cost = noise, drift, cost
        self._random = random.Random(seed)
        self.clock.sleep(self._random.uniform(1.0, 1.1))  # ticks fall anywhere in a block

    def prepared(self, fn: Callable[[], Any], as_graph: bool, around: Around = nullcontext) -> Work:  # noqa: ARG002
        if not as_graph:
            return Work(fn, CALLS, AS_CALLED)
        waits = isinstance(fn, Costs) and fn.waits
        return Work(fn, CALLS, f"{AS_CALLED}: it waits for the GPU" if waits else IN_A_GRAPH)

    def run(self, work: Work, seconds: float) -> Ran:
        self.n_runs += 1
        self.fails(work)
        # How many calls a real replay makes at once depends on the machine; here nothing may.
        cost, calls = (work.run, work.calls) if isinstance(work.run, Costs) else (self._cost, CALLS)
        assert cost is not None
        start_s, n_calls = self.clock.now(), 0
        watts = cost.watts * (1 + self._random.gauss(0, self._noise))
        while not n_calls or self.clock.now() < start_s + seconds:
            self.power.draw(watts * (1 + self._drift * self.clock.now()), self.clock.now())
            runs = max(1, round(0.02 / (calls * cost.call_s)))
            self.clock.sleep(runs * calls * cost.call_s)
            n_calls += runs * calls
        self.power.draw(IDLE_W, self.clock.now())
        return Ran(n_calls, start_s, self.clock.now(), n_calls * cost.host_s)

    def idle(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def release(self) -> None:
        self.n_releases += 1
