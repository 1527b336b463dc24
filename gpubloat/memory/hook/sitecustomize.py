"""What Python runs first where PYTHONPATH names this folder: it loads the agent, which waits for torch.

The sitecustomize that Python would have run without this one is run, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _agent() -> None:
    place = os.path.join(os.path.dirname(_HERE), "agent.py")
    spec = importlib.util.spec_from_file_location("_gpubloat_memory_agent", place)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        module.install()


def _next() -> None:
    places = [place for place in sys.path if os.path.abspath(place) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _agent()
except Exception as error:  # the program runs all the same
    print(f"gpubloat: the memory of this process is not recorded: {error}", file=sys.stderr)
_next()
