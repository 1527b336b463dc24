"""What is in the wheels of a software stack, counted by gpubloat and by two other readers: data/measured/census-*.

python campaigns/libraries/census.py WHEEL... --out data/measured/census-NAME

`fetch.py --census` downloads the wheels of a census again. Takes 1 to 15 minutes on two cores; cuobjdump takes up to
6 GB of memory for libtorch_cuda.so. Needs no GPU, and the extras `test`. A newer cuobjdump refuses a file with a cubin
for a GPU that it has dropped: give an older one with --cuobjdump. The wheel of triton 3.5.1 has 12.8.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # for a checkout that is not installed

import pandas as pd  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import zstandard  # noqa: E402
from fetch import split  # noqa: E402

from gpubloat.libraries import inputs, scan  # noqa: E402
from gpubloat.run import Run, RunWriter  # noqa: E402
from gpubloat.tables.libraries import TABLES  # noqa: E402
from tests import oracles  # noqa: E402

LEFT_OUT = ("functions", "kernels", "variables")
WHY_LEFT_OUT = "left out of the committed census for size; the counts are in libraries and elements"
SHORT_CUBINS = (
    "cubloaty ends a bare cubin before a last section of a processor's own type (.nv.info), which belongs to it"
)


def census(wheels: list[Path], out: Path, older: list[str], force: bool = False) -> Run:
    """Scan `wheels`, ask the other readers, and keep a compact run in `out`.

    `older` are paths of cuobjdump to ask about files that the installed one refuses, newest first.
    """
    tools = [oracles.cuobjdump(), *older]
    with tempfile.TemporaryDirectory(prefix="census-") as temporary:
        full = scan(wheels, kernels=True, functions=True, digests=True, out=Path(temporary, "full"))
        oracle = _oracle(wheels, full, tools, Path(temporary))
        record = full.provenance | {
            "command": f"python campaigns/libraries/census.py WHEEL... --out data/measured/{out.name}",
            "workload": out.name,
            "oracles": {
                "cuobjdump": [oracles.cuobjdump_version(tool) for tool in tools],
                "cubloaty": importlib.metadata.version("cubloaty"),
            },
            "empty": dict.fromkeys(LEFT_OUT, WHY_LEFT_OUT),
            "inputs": [_with_version(wheel) for wheel in full.provenance["inputs"]],
        }
        record["method"] = record["method"] | {
            "oracle": "cuobjdump -lelf, -lptx, -symbols, with and without -all; cubloaty.analysis.analyze_file"
        }
        for key in ("instrument", "tables"):
            del record[key]
        with RunWriter("libraries", [*TABLES, "oracle"], out, force) as writer:
            for name in TABLES:
                if name not in LEFT_OUT:
                    writer.append(name, full[name])
            writer.append("oracle", oracle)
            run = writer.finish(record)
    _pack(run)
    return Run.load(out)


def _with_version(wheel: dict[str, Any]) -> dict[str, Any]:
    package, version, _ = split(wheel["name"])
    return {"name": wheel["name"], "package": package, "version": version} | wheel


def _oracle(wheels: list[Path], run: Run, tools: list[str], temporary: Path) -> pd.DataFrame:
    """One row for each library, in the order of the scan."""
    parts = {name: dict(list(run[name].groupby("library"))) for name in ("elements", "regions", "kernels")}
    empty = {name: run[name].iloc[:0] for name in parts}
    rows = []
    for entry in inputs.discover(wheels).files:
        assert entry.member is not None
        started = time.monotonic()
        # The other readers want a file. One at a time: they are large, and cuobjdump takes 10 times its size in memory.
        file = temporary / Path(entry.member).name
        with zipfile.ZipFile(entry.path) as wheel, wheel.open(entry.member) as member, file.open("wb") as copy:
            shutil.copyfileobj(member, copy, 1 << 20)
        tables = {name: part.get(entry.library, empty[name]) for name, part in parts.items()}
        rows.append({"library": entry.library} | _compare(file, tools, **tables))
        file.unlink()
        print(f"{time.monotonic() - started:6.1f} s  {entry.library}  {rows[-1]['difference']}", flush=True)
    return pd.DataFrame(rows)


def _compare(
    file: Path, tools: list[str], elements: pd.DataFrame, regions: pd.DataFrame, kernels: pd.DataFrame
) -> dict[str, Any]:
    tool, differences = _tool(file, tools)
    row: dict[str, Any] = {"cuobjdump": oracles.cuobjdump_version(tool) if tool else ""}
    is_equal = {"is_elements_equal": tool is not None, "is_kernels_equal": tool is not None}
    for mode, is_all in (("", False), ("_all", True)):
        seen = oracles.visible(elements, regions, all=is_all)
        ours, our_cubins = oracles.our_elements(seen), oracles.our_cubins(seen, kernels)
        row |= _counts(ours, our_cubins, "visible", mode)
        if tool is None:
            row |= dict.fromkeys(_counts(ours, our_cubins, "cuobjdump", mode))
            continue
        theirs, their_cubins = oracles.listed_elements(file, is_all, tool), oracles.cubins(file, is_all, tool)
        row |= _counts(theirs, their_cubins, "cuobjdump", mode)
        option = " -all" if is_all else ""
        if ours != theirs:
            is_equal["is_elements_equal"] = False
            differences.append(
                f"elements{option}: only ours {_few(ours - theirs)}, only cuobjdump {_few(theirs - ours)}"
            )
        if sorted(our_cubins) != sorted(their_cubins):
            is_equal["is_kernels_equal"] = False
            differences.append(f"kernels{option}: {_first_difference(sorted(our_cubins), sorted(their_cubins))}")
    row |= is_equal | _compare_cubloaty(file, oracles.our_images(elements, regions), differences)
    row["is_kernels_equal"] &= _compare_bare(file, tools, elements, regions, kernels, differences)
    return row | {"difference": ". ".join(differences)}


def _compare_bare(
    file: Path,
    tools: list[str],
    elements: pd.DataFrame,
    regions: pd.DataFrame,
    kernels: pd.DataFrame,
    differences: list[str],
) -> bool:
    """Each cubin without a fatbin around it, cut out and unpacked, has the same entry symbols for cuobjdump."""
    bare = elements[elements["region"].isin(regions.loc[regions["is_raw_cubin"], "region"])]
    names = kernels.groupby("region")["kernel"].agg(sorted).to_dict()
    cubin = file.with_name("bare.cubin")
    wrong = []
    for row in bare.itertuples():
        with file.open("rb") as whole:
            whole.seek(row.offset_bytes)
            data = whole.read(row.payload_bytes)
        if row.compression == "zstd":
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=row.uncompressed_bytes)
        cubin.write_bytes(data)
        shown = [_or_refusal(cubin, tool) for tool in tools]
        if names.get(row.region, []) not in shown:
            wrong.append(f"{row.target} at {row.offset_bytes}")
        cubin.unlink()
    if wrong:
        differences.append(f"{len(wrong)} bare cubins have other entry symbols for cuobjdump: {', '.join(wrong[:6])}")
    packed = int((bare["compression"] != "none").sum())
    if packed:
        differences.append(
            f"{packed} bare cubins are packed, which cubloaty does not see; cuobjdump reads them unpacked"
        )
    return not wrong


def _or_refusal(cubin: Path, tool: str) -> list[str] | str:
    try:
        return oracles.bare_kernels(cubin, tool)
    except oracles.OracleError as error:
        return str(error)


def _tool(file: Path, tools: list[str]) -> tuple[str | None, list[str]]:
    """The first of `tools` that reads all cubins of `file`, and a sentence on those before it."""
    refusals = []
    for tool in tools:
        version = oracles.cuobjdump_version(tool)
        try:
            oracles.listed_elements(file, all=True, tool=tool)
        except oracles.OracleError as error:
            refusals.append(f"cuobjdump {version} refuses the file ({str(error).split(' : ')[-1].rstrip('.')})")
        else:
            return tool, [f"{'; '.join(refusals)}: compared with {version}"] if refusals else []
    return None, refusals


def _compare_cubloaty(file: Path, ours: oracles.Images, differences: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    theirs: oracles.Images | None = None
    try:
        theirs = oracles.cubloaty(file)
    except oracles.OracleError as error:
        differences.append(str(error))
    for who, images in (("", ours), ("_cubloaty", theirs)):
        row[f"element_bytes{who}"] = images and sum(t.stored_bytes for t in images.elements.values())
        row[f"raw_cubin_bytes{who}"] = images and sum(size for _, _, size in images.raw)
        kernels = images and [n for _, n, _ in images.raw] + [t.n_kernels for t in images.elements.values()]
        row[f"n_kernels{who}"] = None if kernels is None else sum(kernels)
    if theirs is not None and ours.elements != theirs.elements:
        keys = ours.elements.keys() | theirs.elements.keys()
        texts = [
            f"{' '.join(k)}: ours {_total(ours.elements.get(k))}, cubloaty {_total(theirs.elements.get(k))}"
            for k in sorted(keys)
            if ours.elements.get(k) != theirs.elements.get(k)
        ]
        differences.append(f"elements/bytes/kernels: {'; '.join(texts[:6])}{' ...' if len(texts) > 6 else ''}")
    if theirs is not None and ours.raw != theirs.raw:
        counts = f"{len(ours.raw)} bare cubins of {row['raw_cubin_bytes']} bytes, cubloaty {len(theirs.raw)} of "
        counts += str(row["raw_cubin_bytes_cubloaty"])
        # Same targets and kernels, none of ours shorter: only their ends differ.
        pairs = list(zip(ours.raw, theirs.raw))
        is_known = len(ours.raw) == len(theirs.raw) and all(a[:2] == b[:2] and a[2] >= b[2] for a, b in pairs)
        differences.append(f"{counts}: {SHORT_CUBINS}" if is_known else counts)
    return row | {"is_cubloaty_equal": ours == theirs}


def _counts(
    elements: Counter[tuple[str, str]], cubins: list[tuple[str, list[str]]], who: str, mode: str
) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for (kind, _), n in elements.items():
        kinds[kind] += n
    return {
        f"n_cubins_{who}{mode}": kinds["cubin"],
        f"n_ptx_{who}{mode}": kinds["ptx"],
        f"n_kernels_{who}{mode}": sum(len(names) for _, names in cubins),
    }


def _few(counts: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{n} {kind} {target}" for (kind, target), n in sorted(counts.items())[:6]) or "none"


def _first_difference(ours: list[tuple[str, list[str]]], theirs: list[tuple[str, list[str]]]) -> str:
    for (our_target, our_names), (target, names) in zip(ours, theirs):
        if (our_target, our_names) != (target, names):
            return f"first at a cubin for {our_target} with {len(our_names)}, cuobjdump {target} with {len(names)}"
    return f"{len(ours)} cubins, cuobjdump {len(theirs)}"


def _total(total: oracles.Totals | None) -> str:
    return "none" if total is None else "/".join(str(int(n)) for n in total)


# Columns whose values rise, and those whose values are all different.
_RISING = ("region", "element", "offset_bytes")
_SIZES = ("payload_bytes", "uncompressed_bytes", "size_bytes")
_DISTINCT = ("digest", "sha256", "build_id")


def _pack(run: Run) -> None:
    """Write the tables again as small as Parquet can: it halves them."""
    for name in run:
        path = run.folder / f"{name}.parquet"
        table = pq.read_table(path)
        encoding = dict.fromkeys((c for c in _RISING if c in table.column_names), "DELTA_BINARY_PACKED")
        encoding |= dict.fromkeys((c for c in _SIZES if c in table.column_names), "BYTE_STREAM_SPLIT")
        encoding |= dict.fromkeys((c for c in _DISTINCT if c in table.column_names), "DELTA_LENGTH_BYTE_ARRAY")
        others = [c for c in table.column_names if c not in encoding]
        fields = [f.with_type(pa.string()) if pa.types.is_large_string(f.type) else f for f in table.schema]
        pq.write_table(
            table.cast(pa.schema(fields, table.schema.metadata)), path, compression="zstd", compression_level=22,
            use_dictionary=others, column_encoding=encoding, store_schema=False, write_statistics=False,
            row_group_size=1 << 20, data_page_size=8 << 20,
        )  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--cuobjdump", nargs="*", default=[], help="older ones, newest first")
    parser.add_argument("--force", action="store_true", help="replace a census that is there")
    given = parser.parse_args()
    run = census(given.wheels, given.out, given.cuobjdump, given.force)
    print(run)
    oracle = run["oracle"]
    print(oracle[["is_elements_equal", "is_kernels_equal", "is_cubloaty_equal"]].value_counts().to_string())
    print(oracle.loc[oracle["difference"] != "", ["library", "difference"]].to_string(max_colwidth=None))


if __name__ == "__main__":
    main()
