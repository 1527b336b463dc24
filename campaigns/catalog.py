"""Write data/catalog.toml: every file of data/, with its schema, rows, sha256, source, licence and how it was made.

python campaigns/catalog.py          rewrite it
python campaigns/catalog.py --check  exit 1 if it does not say what is there
"""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

DATA = Path(__file__).resolve().parents[1] / "data"
LICENCE = "CC-BY-4.0"
HEAD = "# Written by campaigns/catalog.py: do not edit. One entry for each file below data/.\n"


def entries() -> list[dict[str, object]]:
    """One record per data file, sorted by path."""
    found = []
    for path in sorted(p for p in DATA.rglob("*") if p.is_file() and p.parent != DATA):
        name = path.relative_to(DATA).as_posix()
        record: dict[str, object] = {"path": name, "bytes": path.stat().st_size}
        record["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        if name.startswith("published/"):
            paper = tomllib.loads((path.parent / "source.toml").read_text("utf-8"))
            record |= {"source": str(paper.get("title", path.parent.name)), "licence": "cited facts"}
            record["made_by"] = "transcribed from the sources named in each row"
            if path.suffix == ".csv":
                record |= {"schema": "published.Published", "rows": len(pd.read_csv(path, dtype=str))}
        elif name.startswith("measured/"):
            run = json.loads((path.parent / "run.json").read_text("utf-8"))
            record |= {"source": path.parent.name, "licence": LICENCE, "made_by": str(run["command"])}
            if path.suffix == ".parquet":
                record["schema"] = f"{run['instrument']}.{path.stem}"
                record["rows"] = pq.ParquetFile(path).metadata.num_rows
        elif name.startswith("samples/"):
            record |= {"source": "campaigns/memory on one H200", "licence": LICENCE}
            record["made_by"] = "campaigns/memory/campaign.py --steps samples"
        found.append(record)
    return found


def text() -> str:
    """The catalog as TOML."""
    blocks = [HEAD]
    for record in entries():
        lines = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in record.items())
        blocks.append(f"[[file]]\n{lines}\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    catalog = DATA / "catalog.toml"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if catalog.exists() and catalog.read_text("utf-8") == text() else "data/catalog.toml is out of date")
    catalog.write_text(text(), encoding="utf-8")
