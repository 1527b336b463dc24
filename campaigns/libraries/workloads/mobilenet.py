"""MobileNetV2 (torchvision), random weights, synthetic images: training or inference. Prints one number.

python mobilenet.py train|infer [--steps N] [--batch N] [--device cuda]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["train", "infer"])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

torch.manual_seed(0)
model = torchvision.models.mobilenet_v2(num_classes=1000).to(given.device)
images = torch.randn(given.batch, 3, 224, 224, device=given.device)
labels = torch.randint(0, 1000, (given.batch,), device=given.device)
value = torch.zeros(())
# To measure what a profiler costs; its trace is dropped.
profiler = torch.profiler.profile() if os.environ.get("WITH_PROFILER") else contextlib.nullcontext()
profiler.__enter__()
if given.mode == "train":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for step in range(given.steps):
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(model(images), labels)
        value.backward()
        optimizer.step()
        if step == 10:
            value.item()
            started_steady = time.perf_counter()
else:
    model.eval()
    with torch.inference_mode():
        for step in range(given.steps):
            value = model(images).double().sum()
            if step == 10:
                value.item()
                started_steady = time.perf_counter()
print(repr(value.item()))
finished = time.perf_counter()
profiler.__exit__(None, None, None)
if given.steps > 11:
    print(f"steady {(finished - started_steady) / (given.steps - 11):.6f} s a step", file=sys.stderr)
