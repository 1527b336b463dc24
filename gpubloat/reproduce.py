"""Execute the notebooks top to bottom, the one way their outputs are written."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from gpubloat.errors import GpubloatError, MissingToolError, extra


def execute(folder: Path, timeout_s: int = 1200) -> Iterator[tuple[str, float]]:
    """Execute every notebook of `folder` in place, in name order; yield (name, seconds).

    A notebook is written back only when all its cells ran. Raises GpubloatError that names the failing notebook.
    """
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
    except ModuleNotFoundError as error:
        raise MissingToolError(str(error.name), extra("notebooks")) from None
    paths = sorted(folder.glob("*.ipynb"))
    if not paths:
        raise GpubloatError(f"{folder}: no notebooks", "run this from a clone of the repository, or give --notebooks")
    for path in paths:
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        # A kernel's note about its transport is no news here; errors of the kernel still show.
        quiet = ["--IPKernelApp.log_level=ERROR"]
        resources = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, timeout=timeout_s, resources=resources, extra_arguments=quiet)
        try:
            client.execute(cwd=str(folder))
        except CellExecutionError as error:
            raise GpubloatError(f"{path}: a cell failed: {error.ename}: {error.evalue}") from None
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of the day would change the file on every run
            for output in cell.get("outputs", []):
                plain = output.get("data", {}).get("text/plain")
                if plain:  # and so would the addresses of objects
                    output["data"]["text/plain"] = re.sub(r" at 0x[0-9a-f]+>", ">", plain)
        notebook.metadata.get("language_info", {}).pop("version", None)
        nbformat.write(notebook, path)
        yield path.name, time.perf_counter() - start
