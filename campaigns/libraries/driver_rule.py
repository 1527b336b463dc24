"""Ask the driver which element of a fatbin region it takes, and hold `gpubloat.tables.targets` against the answer.

On a machine with an NVIDIA GPU, driver and nvcc (stdlib only, about a minute):

    python campaigns/libraries/driver_rule.py collect answers.json

Then, anywhere with gpubloat:

    python campaigns/libraries/driver_rule.py table answers.json --out data/measured/driver-rule-h200

Every element of a region holds the same kernel, which writes the number of its element, so what ran is what was taken.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = 'extern "C" __global__ void which(int *out) { *out = ID; }\n'
# Regions as lists of targets; sm_* is a cubin, compute_* is PTX. Order in a region is the order here.
REGIONS = [
    ["sm_90"],
    ["sm_90a"],
    ["sm_80"],
    ["sm_86"],
    ["sm_89"],
    ["sm_100"],
    ["sm_100f"],
    ["sm_120"],
    ["compute_75"],
    ["compute_80"],
    ["compute_90"],
    ["compute_90a"],
    ["compute_100"],
    ["sm_90", "sm_90a"],
    ["sm_90a", "sm_90"],
    ["sm_90", "compute_90"],
    ["compute_90", "sm_90"],
    ["sm_90a", "compute_90"],
    ["sm_90a", "compute_90a"],
    ["sm_80", "compute_80"],
    ["sm_86", "compute_80"],
    ["sm_89", "compute_75"],
    ["sm_80", "sm_100"],
    ["sm_80", "sm_100", "compute_80"],
    ["sm_100", "compute_100"],
    ["compute_75", "compute_80", "compute_90"],
    ["compute_90", "compute_80", "compute_75"],
    ["compute_80", "compute_90a"],
    ["compute_90", "compute_90a"],
    ["compute_80", "compute_100"],
    ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
]
ERRORS = {
    0: "",
    200: "CUDA_ERROR_INVALID_IMAGE",
    209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    222: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}
FORCE_JIT = "CUDA_FORCE_PTX_JIT"


def build(folder: Path, targets: list[str]) -> bytes:
    """One region with an element for each target; element n writes n."""
    command = ["fatbinary", "-64", f"--create={folder / 'region.fatbin'}"]
    for number, target in enumerate(targets):
        image = folder / f"{number}-{target}"
        form = "-ptx" if target.startswith("compute") else "-cubin"
        source = folder / "kernel.cu"
        source.write_text(SOURCE)
        subprocess.run(["nvcc", form, f"-arch={target}", f"-DID={number}", "-o", image, source], check=True)
        kind = "ptx" if form == "-ptx" else "elf"
        command.append(f"--image3=kind={kind},sm={target.split('_')[1]},file={image}")
    subprocess.run(command, check=True)
    return (folder / "region.fatbin").read_bytes()


def ask(image: bytes) -> tuple[int | None, int]:
    """(element that ran, driver error) for one region on GPU 0."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    memory, answer = ctypes.c_uint64(), ctypes.c_int(-1)
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
    ):
        if code:
            raise SystemExit(f"no usable GPU: driver error {code}")
    code = cuda.cuModuleLoadData(ctypes.byref(module), image)
    code = code or cuda.cuModuleGetFunction(ctypes.byref(function), module, b"which")
    if code:
        return None, code
    cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4))
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(memory), ctypes.c_void_p))
    code = cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
    code = code or cuda.cuCtxSynchronize()
    code = code or cuda.cuMemcpyDtoH_v2(ctypes.byref(answer), memory, ctypes.c_size_t(4))
    return (answer.value if not code else None), code


def collect(path: Path) -> None:
    """Ask for every region, each in a process of its own: a failed load must not touch the next."""
    answers = []
    with tempfile.TemporaryDirectory() as name:
        for targets in REGIONS:
            image = Path(name, "image")
            image.write_bytes(build(Path(name), targets))
            for forced in (False, True):
                environment = {k: v for k, v in os.environ.items() if k != FORCE_JIT} | (
                    {FORCE_JIT: "1"} if forced else {}
                )
                done = subprocess.run(
                    [sys.executable, __file__, "ask", str(image)],
                    capture_output=True,
                    text=True,
                    env=environment,
                    timeout=120,
                )
                chosen, code = json.loads(done.stdout) if done.returncode == 0 else (None, -done.returncode)
                answers.append({"targets": targets, "is_jit_forced": forced, "chosen": chosen, "error": code})
                print(targets, "forced" if forced else "", chosen, code)
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    gpu, capability, driver = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0].split(", ")
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    record = {"gpu": gpu, "capability": capability, "driver": driver, "nvcc": nvcc, "python": platform.python_version()}
    path.write_text(json.dumps(record | {"answers": answers}, indent=1) + "\n")


def table(path: Path, out: Path, force: bool) -> None:
    """Answers and rule side by side, as a run."""
    import pandas as pd

    from gpubloat.run import RunWriter, provenance
    from gpubloat.tables import targets

    record = json.loads(path.read_text())
    rows = []
    for number, answer in enumerate(record["answers"]):
        for index, target in enumerate(answer["targets"]):
            rows.append(
                {
                    "library": record["gpu"], "region": number, "element": index, "member": None,
                    "kind": "ptx" if target.startswith("compute") else "cubin", "target": target,
                    "is_jit_forced": answer["is_jit_forced"], "is_chosen": answer["chosen"] == index,
                    "error": ERRORS.get(answer["error"], f"driver error {answer['error']}"),
                }
            )  # fmt: skip
    frame = targets.fit(pd.DataFrame(rows), record["capability"])
    frame = frame.rename(columns={"library": "gpu"}).drop(columns="member")
    method = {"is_chosen": "the kernel of each element writes the element's number; cuModuleLoadData of the region"}
    about = provenance("campaigns/libraries/driver_rule.py", method, [])
    about |= {"gpus": [record["gpu"]], "driver": record["driver"], "nvcc": record["nvcc"], "workload": "driver-rule"}
    with RunWriter("libraries", ["choices"], out, force) as writer:
        writer.append("choices", frame)
        writer.finish(about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("collect", "ask", "table"):
        verbs.add_parser(verb).add_argument("path", type=Path)
    verbs.choices["table"].add_argument("--out", type=Path, required=True)
    verbs.choices["table"].add_argument("--force", action="store_true")
    given = parser.parse_args()
    if given.verb == "collect":
        collect(given.path)
    elif given.verb == "ask":
        print(json.dumps(ask(given.path.read_bytes())))
    else:
        table(given.path, given.out, given.force)
