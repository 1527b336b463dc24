"""What a trace leaves out: a ring buffer that dropped its oldest events says so nowhere in the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

MID_RUN = "starts mid-run: "
NO_HISTORY = (
    "no events: the snapshot was taken without history; call torch.cuda.memory._record_memory_history() before the run"
)


class History:
    """Counts, fed with the events of a trace piece by piece, then asked about the blocks at the end."""

    def __init__(self) -> None:
        self._live: dict[int, set[int]] = {}
        self._found: dict[int, dict[str, int]] = {}

    def add(self, events: pd.DataFrame) -> None:
        for device in map(int, events["device"].unique()):
            part = events[events["device"] == device]
            live = self._live.setdefault(device, set())
            found = self._found.setdefault(device, {"n_events": 0, "n_frees_without_alloc": 0, "n_allocs_of_live": 0})
            found["n_events"] += len(part)
            for action, address in zip(part["action"].tolist(), part["address"].tolist()):
                if action == "alloc":
                    found["n_allocs_of_live"] += address in live
                    live.add(address)
                elif action == "free_completed":
                    if address in live:
                        live.remove(address)
                    else:
                        found["n_frees_without_alloc"] += 1

    def summary(self, blocks: pd.DataFrame, segments: pd.DataFrame) -> dict[str, Any]:
        """One record per device for run.json, with `starts_mid_run` and a sentence that says why."""
        held = blocks[blocks["state"].isin(["active_allocated", "active_pending_free"])]
        answer: dict[str, Any] = {}
        for device in sorted({*self._found, *map(int, segments["device"].unique())}):
            found = dict(self._found.get(device, {}))
            n_events = found.get("n_events", 0)
            if not n_events:
                answer[str(device)] = {"n_events": 0, "starts_mid_run": None, "why": NO_HISTORY}
                continue
            live = self._live.get(device, set())
            address = held.loc[held["device"] == device, "address"].to_numpy(np.uint64)
            n_blocks = len(set(address.tolist()) - live)
            n_gone = len(live - set(address.tolist()))
            found |= {"n_blocks_without_alloc": n_blocks, "n_live_without_block": n_gone}
            reasons = []
            if found["n_frees_without_alloc"]:
                reasons.append(f"{found['n_frees_without_alloc']} frees of blocks whose allocation is not in the trace")
            if n_blocks:
                reasons.append(f"{n_blocks} blocks at the end whose allocation is not in the trace")
            why = MID_RUN + " and ".join(reasons) if reasons else "every block was allocated in the trace"
            answer[str(device)] = {**found, "starts_mid_run": bool(reasons), "why": why}
        return answer
