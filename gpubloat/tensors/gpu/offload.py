"""Linear layers whose weights stay packed in host memory and are decoded when they are needed (inference only)."""

from __future__ import annotations

from typing import Any

from gpubloat.errors import GpubloatError
from gpubloat.tensors import packing
from gpubloat.tensors.gpu import launch
from gpubloat.tensors.gpu.torchuse import PackedTensor, as_bytes, empty, torch


def offload(module: Any, device: Any = "cuda") -> Any:
    """Replace every nn.Linear inside `module` by an OffloadedLinear; the rest goes to `device`. Returns `module`.

    Layers are expected to run in the order in which they were made: the next one's weight is decoded while one
    computes. Another order is right, too, but waits. Weights of other layers that share memory with a linear one's
    (tied embeddings) stay whole.

    Raises
    ------
    GpubloatError : `module` is a linear layer itself, or has none. Others as `PackedTensor.pin`.
    """
    if isinstance(module, torch.nn.Linear):
        raise GpubloatError("a linear layer alone cannot be replaced in place", "put it into an nn.Sequential")
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", launch.gpu(where).index)
    layers: list[OffloadedLinear] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                weight = PackedTensor(packing.pack(child.weight))
                layers.append(OffloadedLinear(weight.pin() if where.type == "cuda" else weight, child.bias))
                setattr(parent, name, layers[-1])
    if not layers:
        raise GpubloatError("the module has no linear layer")
    decoder = Decoder(layers, where)
    for i, layer in enumerate(layers):
        layer.decoder, layer.number = decoder, i
    return module.to(where)


class OffloadedLinear(torch.nn.Module):  # type: ignore[misc]
    """y = x A^T + b, where A is packed in host memory. GpubloatError where a gradient would need A later."""

    def __init__(self, weight: PackedTensor, bias: Any) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.decoder: Decoder
        self.number = 0

    def forward(self, x: Any) -> Any:
        if x.requires_grad and torch.is_grad_enabled():
            raise GpubloatError("an offloaded layer has no weight left for a backward pass", "use torch.no_grad()")
        y = torch.nn.functional.linear(x, self.decoder.take(self.number), self.bias)
        self.decoder.done(self.number)
        return y

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {self.weight.dtype}, saving {self.weight.packed.saving_frac:.1%}"


class Decoder:
    """Two buffers on the device that all layers share: one computes from one, the next is decoded to the other."""

    def __init__(self, layers: list[OffloadedLinear], device: Any) -> None:
        self.weights = [layer.weight for layer in layers]
        self.on_gpu = device.type == "cuda"
        most = max(w.packed.raw_bytes for w in self.weights)
        self.buffers = [empty(most, torch.uint8, device) for _ in range(2)]
        self.holds: list[int | None] = [None, None]
        self.last = 1  # the buffer that was filled last
        if self.on_gpu:
            words = max(len(w.packed.words) for w in self.weights)
            self.stages = [empty(words, torch.int32, device) for _ in range(2)]
            self.rows = [w.rows(device) for w in self.weights]
            self.side = torch.cuda.Stream(device)
            self.side.wait_stream(torch.cuda.current_stream(device))
            self.ready = [torch.cuda.Event() for _ in range(2)]
            self.free = [torch.cuda.Event() for _ in range(2)]

    def take(self, number: int) -> Any:
        """The weight of a layer, valid until `done`; the next layer's is started."""
        if number not in self.holds:
            self._start(number)
        buffer = self.holds.index(number)
        if self.on_gpu:
            torch.cuda.current_stream(self.buffers[buffer].device).wait_event(self.ready[buffer])
            following = (number + 1) % len(self.weights)
            if following not in self.holds:
                self.last = buffer
                self._start(following)
        return self._view(number, buffer)

    def done(self, number: int) -> None:
        """What reads the weight is on the current stream: the buffer may be overwritten behind it."""
        if self.on_gpu:
            self.free[self.holds.index(number)].record(torch.cuda.current_stream(self.buffers[0].device))

    def _view(self, number: int, buffer: int) -> Any:
        weight = self.weights[number]
        return self.buffers[buffer][: weight.packed.raw_bytes].view(weight.dtype).view(weight.shape)

    def _start(self, number: int) -> None:
        """Decode a weight to the buffer that was not filled last."""
        buffer = self.last = 1 - self.last
        self.holds[buffer] = number
        weight, target = self.weights[number], self._view(number, buffer)
        if not self.on_gpu:
            as_bytes(target).copy_(as_bytes(weight.to("cpu")))
            return
        stage = self.stages[buffer][: len(weight.packed.words)]
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.free[buffer])
            weight.copy_words(stage, 0)
            self.rows[number].part(0, weight.packed.n_rows, stage, 0).decode(target)
            self.ready[buffer].record(self.side)
