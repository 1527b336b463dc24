"""MobileNetV2 (torchvision), random weights, synthetic images: training or inference. Prints one number.

python mobilenet.py train|infer [--steps N] [--batch N] [--device cuda]
"""

from __future__ import annotations

import contextlib
import os

import torch
import torchvision
from common import arguments, run

parser = arguments(steps=20, batch=32)
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

torch.manual_seed(0)
model = torchvision.models.mobilenet_v2(num_classes=1000).to(given.device)
images = torch.randn(given.batch, 3, 224, 224, device=given.device)
labels = torch.randint(0, 1000, (given.batch,), device=given.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(_: int) -> torch.Tensor:
    optimizer.zero_grad()
    value = torch.nn.functional.cross_entropy(model(images), labels)
    value.backward()
    optimizer.step()
    return value


@torch.inference_mode()
def infer(_: int) -> torch.Tensor:
    return model(images).double().sum()


model.train(given.mode == "train")
# To measure what a profiler costs; its trace is dropped.
with torch.profiler.profile() if os.environ.get("WITH_PROFILER") else contextlib.nullcontext():
    run(train if given.mode == "train" else infer, given.steps, torch.Tensor.item)
