"""One self-contained HTML page about a run."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from gpubloat.analysis import debloat, diagnosis, memory, rates, usage, whatif
from gpubloat.analysis import energy as joules
from gpubloat.analysis import libraries as analysis
from gpubloat.analysis import tensors as bits
from gpubloat.errors import GpubloatError
from gpubloat.plots import energy as energy_plots
from gpubloat.plots import libraries as plots
from gpubloat.plots import memory as memory_plots
from gpubloat.plots import rates as rate_plots
from gpubloat.plots import style
from gpubloat.plots import tensors as tensor_plots
from gpubloat.run import Run

_STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 8px;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left;overflow-wrap:anywhere;min-width:8rem}img{max-width:100%}pre{background:#f6f6f6;
padding:.6rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}"""


def write(run: Run, path: Path, *, force: bool = False) -> None:
    """Write the page. Raises GpubloatError if `path` exists (without `force`) or the instrument has no page."""
    if path.exists() and not force:
        raise GpubloatError(f"{path} exists", "name another file, or add --force")
    if run.instrument not in _PAGES:
        raise GpubloatError(f"no report for runs of {run.instrument}", f"known: {', '.join(_PAGES)}")
    body = "".join(f"<h2>{html.escape(title)}</h2>{part}" for title, part in _PAGES[run.instrument](run))
    about = html.escape(json.dumps(run.provenance, indent=1, ensure_ascii=False))
    title = f"gpubloat {run.instrument}"
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1>{run._repr_html_()}{body}<h2>Where it came from</h2><pre>{about}</pre></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _libraries(run: Run) -> list[tuple[str, str]]:
    """What the run's tables allow: a scan, a traced run, a debloated folder, a verification."""
    parts = []
    if {"loaded", "used_functions", "evidence", "elements"} <= set(run):
        parts.append(("What was used", _table(usage.overview(run))))
    if "reduction" in tuple(run):
        parts.append(("What was removed", _table(debloat.overview(run["reduction"]))))
    for name, title in (("verdicts", "Originals against copies"), ("misses", "Removed code that was met")):
        if name in tuple(run) and len(run[name]):
            parts.append((title, _table(run[name].head(200))))
    return parts + (_scan(run) if {"libraries", "elements"} <= set(run) else [])


def _scan(run: Run) -> list[tuple[str, str]]:
    shares = analysis.code_shares(run["libraries"])
    parts = [
        ("Libraries", _table(analysis.overview(run["libraries"], run["elements"]))),
        (
            "GPU code, CPU code and the rest",
            _figure(lambda ax: plots.code_bars(shares.head(20), ax=ax), 1 + 0.2 * min(len(shares), 20)),
        ),
    ]
    by_target = analysis.bytes_by_target(run["elements"])
    if len(by_target):
        biggest = by_target.groupby("library")["stored_bytes"].sum().nlargest(20).index
        shown = by_target[by_target["library"].isin(biggest)]
        height = 1.5 + 0.25 * len(biggest)
        parts.append(("Bytes by target", _figure(lambda ax: plots.target_heatmap(shown, ax=ax), height)))
    if run.provenance.get("target"):
        parts.append((f"What {run.provenance['target']} can load", _table(analysis.fits(run["elements"]))))
    if "problems" in tuple(run) and len(run["problems"]):
        parts.append(("Problems", _table(run["problems"].head(200))))
    return parts


def _memory(run: Run) -> list[tuple[str, str]]:
    """A loaded snapshot, or what replays of one gave."""
    parts = []
    if {"events", "segments", "blocks", "stacks", "frames"} <= set(run):
        events, segments, blocks = run["events"], run["segments"], run["blocks"]
        history = memory.history(events, segments, blocks)
        for device in sorted(history["device"].unique()):
            mine, marks = (table[table["device"] == device] for table in (history, events))
            title = f"Reserved and active memory of GPU {device}"
            parts.append((title, _figure(lambda ax: memory_plots.timeline(mine, marks, ax=ax), 2.6)))  # noqa: B023
        found = diagnosis.tables(events, segments, blocks, run["stacks"], run["frames"])
        parts += [(diagnosis.TITLES[name].capitalize(), _table(table.head(30))) for name, table in found.items()]
    if "replays" in tuple(run):
        table = whatif.what_if(run["replays"], bounds=run["bounds"] if "bounds" in tuple(run) else None)
        parts.append(("What each allocator would have reserved", _table(table)))
        parts.append(("Verdict", f"<p>{html.escape(whatif.verdict(table))}</p>"))
    return parts


_TENSORS = ["label", "dtype", "raw_bytes", "best_frac", "paper_frac", "chunk_bits", *bits.BOUNDS]


def _tensors(run: Run) -> list[tuple[str, str]]:
    """What the run's tables allow: of tensors, or of a campaign that timed them on a GPU."""
    parts = _bits(run) if {"tensors", "bits", "savings"} <= set(run) else []
    return parts + (_rates(run["rates"]) if "rates" in set(run) else [])


def _bits(run: Run) -> list[tuple[str, str]]:
    """Savings and bounds of the largest tensors, where their bits agree, and what is held in too wide a type."""
    found = bits.against_bounds(run["tensors"], run["savings"])
    parts = [("What packing saves, and bounds", _table(found[_TENSORS]))]
    largest = found.head(20)[bits.KEYS]
    widths = run["tensors"][[*bits.KEYS, "element_bits"]].merge(largest, on=bits.KEYS)
    for width, these in widths.groupby("element_bits"):
        agreement = bits.bit_map(run["bits"].merge(these[bits.KEYS], on=bits.KEYS).dropna(subset="agreement_mean_frac"))
        if len(agreement):
            draw = _figure(lambda ax: tensor_plots.invariance_map(agreement, ax=ax), 1.2 + 0.2 * len(these))  # noqa: B023
            parts.append((f"Where bits agree, elements of {width} bits", draw))
    hidden = bits.hidden_precision(run["tensors"], run["bits"])
    if len(hidden):
        parts.append(("Hidden precision", _table(hidden[["label", "dtype", "raw_bytes", "unused_bytes", "finding"]])))
    return parts


def _rates(table: pd.DataFrame) -> list[tuple[str, str]]:
    """What was measured, and of matrices and workloads how fast they arrive."""
    parts = [("What was measured", _table(rates.coverage(table)))]
    decoded, gained = rates.decode_rates(table), rates.speedups(table)
    if len(decoded):
        height = 1.4 + 0.2 * len(decoded)
        parts.append(("Rows by number", _figure(lambda ax: rate_plots.decode_dots(decoded, ax=ax), height)))
        parts.append(("Rates of matrices", _table(decoded)))
    if len(gained):
        parts.append(("Workloads", _table(gained)))
    return parts


_CASES = ["subject", "case", "verdict", *joules.SAVED, "wasteful", "time_ratio", "cause", "a_line", "b_line", "reason"]
_REGIONS = ["region", "a_operators", "b_operators", "a_line", "b_line", *joules.SAVED, "verdict", "cause", "evidence"]
_OPERATORS = ["name", "module", "line", "n_same", "step_time_us", "step_j", "error_j", "step_frac", "method", "notes"]
_ENERGY_TABLES = {"signals", "loads", "samples", "blocks", "operators", "closure", "regions", "comparisons"}


def _energy(run: Run) -> list[tuple[str, str]]:
    """Signals of a probe; operators of measured steps; comparisons. What is not in the run is not on the page."""
    table = {name: run[name] for name in _ENERGY_TABLES & set(run)}
    parts = []
    trusted = run.provenance.get("joules")
    if trusted is not None:
        told = "The energy counter is to be believed." if trusted["is_trusted"] else f"No joules: {trusted['reason']}."
        parts.append(("Verdict", f"<p>{html.escape(told)}</p>"))
    if "loads" in table:
        power = joules.power_of_loads(table["loads"])
        height = 1.2 + 0.3 * power["load"].nunique()
        parts.append(("Power of loads", _figure(lambda ax: energy_plots.loads(power, ax=ax), height)))
        parts.append(("Agreement of signals", _table(joules.agreement(table["loads"]))))
    if "samples" in table:
        rising = [part for part in table["samples"]["part"].unique() if str(part).startswith("product")]
        for part in rising[:1]:
            over_time = joules.power_over_time(table["samples"], part)
            parts.append(("As a load begins", _figure(lambda ax: energy_plots.samples(over_time, ax=ax), 2.6)))  # noqa: B023
    if "comparisons" in table and len(table["comparisons"]):
        found = joules.cases(table["comparisons"])
        height = 1.4 + 0.22 * len(found)
        parts.append(("What is saved", _figure(lambda ax: energy_plots.cases(found, ax=ax), height)))
        parts.append(("Comparisons", _table(found[_CASES])))
    if "regions" in table and len(table["regions"]):
        differing = table["regions"][~table["regions"]["is_same"]]
        parts.append(("Regions that differ", _table(differing[["subject", *_REGIONS]].head(50))))
    return parts + (_steps(table["operators"], table["closure"]) if {"operators", "closure"} <= set(table) else [])


def _steps(operators: pd.DataFrame, closure: pd.DataFrame) -> list[tuple[str, str]]:
    parts = []
    for (subject, side), mine in joules.by_operator(operators, closure).groupby(joules.STEP, sort=False):
        height = 0.8 + 0.19 * min(len(mine), 19)
        if mine["step_j"].notna().any():
            title = f"Energy of {subject}, side {side}"
            parts.append((title, _figure(lambda ax: energy_plots.operators(mine, ax=ax), height)))  # noqa: B023
        is_rest = mine["kind"] == joules.REMAINDER
        shown = pd.concat([mine[~is_rest].head(30), mine[is_rest]])
        shown["step_time_us"] = 1e6 * shown["step_time_s"]
        for name in ("step_time_us", "step_j", "error_j"):  # of microjoules, too, which three decimals would make 0
            shown[name] = ["" if pd.isna(value) else f"{value:.4g}" for value in shown[name]]
        parts.append((f"Operators of {subject}, side {side}", _table(shown[_OPERATORS])))
    return parts


_PAGES: dict[str, Callable[[Run], list[tuple[str, str]]]] = {
    "energy": _energy,
    "libraries": _libraries,
    "tensors": _tensors,
    "memory": _memory,
}


def _table(frame: pd.DataFrame) -> str:
    shown = frame.copy()
    for name in frame.select_dtypes("integer"):
        shown[name] = ["-" if pd.isna(v) else f"{v:,}" for v in frame[name]]
    table = shown.to_html(index=False, border=0, na_rep="-", float_format="{:.3f}".format, escape=True)
    return f"<div class=wide>{table}</div>"


def _figure(draw: Callable[[Axes], Axes], height: float) -> str:
    with style.paper("page", height) as size:
        figure, ax = plt.subplots(**size)
        draw(ax)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        plt.close(figure)
    return f"<img alt='figure' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"
