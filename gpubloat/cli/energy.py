"""`gpubloat energy ...`: which signals of a GPU tell its energy, whether to believe them, and who takes it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpubloat.cli.common import Csv, Force, Json, Out, command_line, print_table, records, two_folders
from gpubloat.errors import DeviceError, GpubloatError, printable

if TYPE_CHECKING:
    import pandas as pd

_MOST_NOTES = 5
TimesOnly = Annotated[
    bool, typer.Option("--times-only", help="Take times alone, no energies: works without a GPU, on the CPU.")
]
app = typer.Typer(no_args_is_help=True)


@app.callback()
def _energy() -> None:
    """Joules of GPU programs: what can be measured, and how well.

    All of it needs an NVIDIA GPU, but for `measure --times-only` and
    `diff --times-only`, which take times on the CPU where there is none.
    """


@app.command("probe")
def probe(
    gpu: Annotated[
        int, typer.Option("--gpu", metavar="N", min=0, help="Number of the GPU, as PyTorch counts: from 0.")
    ] = 0,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say which signals of a GPU answer, and whether its energy counter is to be believed. Needs a GPU.

    Takes 70 seconds of it and sets nothing on it. Needs PyTorch, which makes
    the load.
    """
    from gpubloat import energy
    from gpubloat.energy.loads import TorchLoads
    from gpubloat.energy.meter import NoDevice

    two_folders(csv, out, force)
    meter = energy.open_meter(gpu)
    if isinstance(meter, NoDevice):
        raise _no_gpu(meter.error())
    try:
        run = energy.probe(meter, TorchLoads(gpu), out=out, force=force, command=command_line())
    finally:
        meter.close()
    if csv is not None:
        run.to_csv(csv, force=force)
    _say(run, as_json)
    for place in (csv, out):
        if place is not None and not as_json:
            print(f"wrote {place}")


@app.command("measure")
def measure(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:function]",
            help="The function, which returns tensors; its name can be left out if the file has one.",
        ),
    ],
    deadline_s: Annotated[
        float,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=1,
            help="Measure no further operator after so many seconds; the function itself and large operators first.",
        ),
    ] = 120.0,
    times: Annotated[
        int | None,
        typer.Option(
            "--times",
            metavar="CALLS",
            min=1,
            show_default="not said",
            help="Also say what so many calls take, in kWh. Needs a GPU.",
        ),
    ] = None,
    grid: Annotated[
        float | None,
        typer.Option(
            "--grid",
            metavar="G_PER_KWH",
            min=0,
            show_default="not said",
            help="And in grams of CO2e, by those that the electricity of a kWh emits, such as 350. Needs --times.",
        ),
    ] = None,
    times_only: TimesOnly = False,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Groups of equal operators to print, the largest first.")
    ] = 20,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure the energy of a function, and of each of its operators alone. Needs a GPU, or --times-only.

    The function is called with the tuple that `inputs(seed)` of the file
    returns, if it takes arguments. Identical operators are measured once.
    """
    from gpubloat.energy import measuring
    from gpubloat.energy.workload import split, workload

    two_folders(csv, out, force)
    if grid is not None and times is None:
        raise GpubloatError("--grid needs --times", "say how often the function is called: --times CALLS")
    if times is not None and times_only:
        raise GpubloatError("--times needs energies", "leave out --times-only")
    split(what)
    if not times_only:
        _refuse_without_gpu()
    with workload(what) as work:
        run = measuring.measure(
            work.fn, *work.args, subject=work.name, deadline_s=deadline_s, times_only=times_only, out=out, force=force,
            progress=True, command=command_line(),
        )  # fmt: skip
    if csv is not None:
        run.to_csv(csv, force=force)
    table = run["operators"]
    table = table.sort_values(["step_j", "step_time_s"], ascending=False, na_position="last")
    footprint = None if times is None else measuring.total(run["closure"], times, grid)
    if as_json:
        told = {name: run.provenance[name] for name in ("meter", "joules", "idle_w", "framework", "notes")}
        told |= {"total": footprint, "closure": records(run["closure"])[0], "operators": records(table)}
        print(json.dumps(told))
        return
    print_table(_operators(table.head(top)), title=f"{'times' if times_only else 'energy'} of {work.name} by operator")
    if len(table) > top:
        print(f"{len(table) - top} smaller groups of operators are not shown (--top, --csv)")
    print(measuring.closing(run["closure"]))
    for note in run.provenance["notes"][:_MOST_NOTES]:
        print(f"note: {printable(note)}")
    if not times_only:
        joules = run.provenance["joules"]
        print("joules: " + (joules["reason"] or "the counter agrees with the card's own power, within 5 %"))
    if footprint is not None:
        print(_footprint(footprint, times, grid))
    for place in (csv, out):
        if place is not None:
            print(f"wrote {place}")


@app.command("diff")
def diff(
    a: Annotated[str, typer.Argument(metavar="A.py:function", help="One function, which returns tensors.")],
    b: Annotated[str, typer.Argument(metavar="B.py:function", help="One that should compute the same.")],
    deadline_s: Annotated[
        float,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=1,
            help="Measure no further part after so many seconds; the whole functions first.",
        ),
    ] = 300.0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="FRAC",
            min=0,
            show_default="by type: fp32 0.00001, bf16 and fp16 0.01",
            help="Relative error allowed between outputs that count as equal, such as 0.001.",
        ),
    ] = None,
    times_only: TimesOnly = False,
    csv: Csv = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say which of two functions takes more energy, where, why, and what saves it. Needs a GPU, or --times-only.

    Both are called with what `inputs(seed)` of A's file returns; with that
    of their own file if those are of another framework. A is also measured
    against itself: what that differs by is the least that is claimed. With
    --times-only it says which one is slower, and why.
    """
    from gpubloat.energy.differences.flow import diff as diff_
    from gpubloat.energy.workload import kinds, split, workload

    two_folders(csv, out, force)
    for spec in (a, b):
        split(spec)
    if not times_only:
        _refuse_without_gpu()
    with workload(a) as one, workload(b, given=one.args) as other:
        is_alike = kinds(one.args) == kinds(other.args)
        again = one.make(1)
        run = diff_(
            one.fn, other.fn, *one.args, b_args=one.args if is_alike else other.args,
            again=(again, again if is_alike else other.make(1)) if one.has_inputs else None,
            tolerance=tolerance, deadline_s=deadline_s, times_only=times_only, names=(one.name, other.name), out=out,
            force=force, progress=True, command=command_line(),
        )  # fmt: skip
    if csv is not None:
        run.to_csv(csv, force=force)
    row = records(run["comparisons"])[0]
    if as_json:
        told = {name: run.provenance[name] for name in ("verdict", "meter", "joules", "idle_w")}
        print(json.dumps(told | {"comparison": row, "regions": records(run["regions"])}))
        return
    print_table(_sides(row), title=f"A {row['a']} against B {row['b']}")
    print(f"verdict: {row['verdict']}: {printable(row['reason'])}")
    for line in _cause(row):
        print(printable(line))
    differing = run["regions"][~run["regions"]["is_same"]]
    if len(differing):
        print_table(_regions(differing), title="regions whose operators differ")
    n_same = len(run["regions"]) - len(differing)
    if n_same:
        print(f"{n_same} region{'s run' if n_same > 1 else ' runs'} the same operators on both sides")
    for place in (csv, out):
        if place is not None:
            print(f"wrote {place}")


def _refuse_without_gpu() -> None:
    """Before the user's file is loaded, and PyTorch with it."""
    from gpubloat.energy.measuring import opened_meter

    try:
        with ExitStack() as held:
            opened_meter(None, 0, held)
    except DeviceError as error:
        raise _no_gpu(error) from error


def _no_gpu(error: DeviceError) -> DeviceError:
    return DeviceError(error.reason, f"this needs an NVIDIA GPU that can be measured: {error.message}", error.hint)


def _sides(row: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    columns = {"mJ a call": "call_j", "active mJ": "active_j", "ms a call": "call_s", "CPU ms": "host_s"}
    table = {"side": ["A", "B"]}
    for name, column in columns.items():
        values = pd.Series([row[f"a_{column}"], row[f"b_{column}"]], dtype=float)
        if values.notna().any():
            table[name] = list(_digits(1e3 * values))
    return pd.DataFrame(table)


def _cause(row: dict[str, Any]) -> list[str]:
    told = []
    if row["saved_frac"] is not None:
        interval = f"{row['low_frac']:.1%} to {row['high_frac']:.1%}"
        band = "" if row["band_frac"] is None else f"; A against A differs by {row['band_frac']:.2%}"
        told.append(f"saved by the other side of {row['wasteful']}: {row['saved_frac']:.1%} ({interval}{band})")
    equal = {True: "equal", False: "not equal", None: "not compared"}[row["outputs_equal"]]
    error = "" if row["output_error"] is None else f", relative error {row['output_error']:.1e}"
    told.append(f"outputs: {equal}{error}")
    if row["cause"]:
        told.append(f"cause: {row['cause']}: {row['evidence']}")
        told += [f"  {side}: {row[column]}" for side, column in (("A", "a_line"), ("B", "b_line")) if row[column]]
        told.append(f"remedy: {row['remedy']}")
    if row["fix"] and row["fix_saved_frac"] is not None:
        interval = f"{row['fix_low_frac']:.1%} to {row['fix_high_frac']:.1%}"
        told.append(f"measured again with {row['fix']}: {row['fix_saved_frac']:.1%} saved ({interval})")
    return told + [f"note: {note}" for note in row["notes"].split("; ")[:_MOST_NOTES] if note]


def _regions(table: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {}
    for side in ("a", "b"):
        columns[f"{side.upper()} runs"] = table[f"{side}_operators"]
        columns[f"{side.upper()} µs"] = _digits(1e6 * table[f"{side}_time_s"])
        if table[f"{side}_call_j"].notna().any():
            columns[f"{side.upper()} mJ"] = _digits(1e3 * table[f"{side}_call_j"])
    return pd.DataFrame(columns | {"verdict": table["verdict"], "cause": table["cause"]})


def _footprint(footprint: dict[str, float | None], times: int | None, grid: float | None) -> str:
    kwh, g_co2e = footprint["kwh"], footprint["g_co2e"]
    if kwh is None:
        return f"{times:,} calls: not measured"
    grams = "" if g_co2e is None else f", {g_co2e:.4g} g CO2e at {grid:g} g per kWh"
    return f"{times:,} calls: {kwh:.4g} kWh of the GPU board{grams}"


def _operators(table: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    energies = {
        "mJ a call": _digits(1e3 * table["call_j"]),
        "+-": _digits(1e3 * table["error_j"]),
        "mJ a step": _digits(1e3 * table["step_j"]),
        "share %": _digits(100 * table["step_frac"]),
    }
    columns = {"operator": table["name"], "line": table["line"], "n": table["n_same"]}
    columns |= {"µs a call": _digits(1e6 * table["call_time_s"]), "µs a step": _digits(1e6 * table["step_time_s"])}
    columns |= {} if table["call_j"].isna().all() else energies
    columns["how"] = table["method"] + (": " + table["notes"]).where(table["notes"] != "", "")
    return pd.DataFrame(columns)


def _digits(values: pd.Series[float]) -> pd.Series[str]:
    """Three digits that count: values span many sizes."""
    return values.map(lambda value: "-" if value != value else f"{value:.3g}" if value < 1000 else f"{value:,.0f}")


def _say(run: Any, as_json: bool) -> None:
    signals, loads = run["signals"], run["loads"]
    joules, idle_w = run.provenance["joules"], run.provenance["idle_w"]
    if as_json:
        told = {"meter": run.provenance["meter"], "joules": joules, "idle_w": idle_w}
        print(json.dumps(told | {"signals": records(signals), "loads": records(loads)}))
        return
    print_table(_signals(signals), title=f"signals of {run.provenance['meter']['name']}")
    print_table(_loads(loads), title="power of loads, by each signal")
    print(f"idle with a context: {'not measured' if idle_w is None else f'{idle_w:.1f} W'}")
    print("joules: " + ("to be believed, within 5 %" if joules["is_trusted"] else joules["reason"]))


def _signals(signals: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "signal": signals["signal"],
            "answers": signals["is_answering"],
            "period ms": (1e3 * signals["period_s"]).round(1),
            "call µs": (1e6 * signals["call_s"]).round(1),
            "rise ms": (1e3 * signals["rise_s"]).round(0),
            "notes": signals["notes"],
        }
    )


def _loads(loads: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "load": loads["load"],
            "repeat": loads["repeat"],
            "slope W": loads["slope_w"].round(1),
            "+- W": loads["slope_error_w"].round(1),
            "instant W": loads["instant_w"].round(1),
            "1-s mean W": loads["average_w"].round(1),
            "apart %": (100 * loads["agreement_frac"]).round(2),
            "SM MHz": loads["sm_mhz"].round(0),
            "notes": loads["notes"],
        }
    )
