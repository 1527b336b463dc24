"""One call or more of each numerical library of CUDA through torch: cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE, NCCL.

Prints one number for each, all of them reproducible from run to run.

python calls.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

device = "cuda"
torch.manual_seed(0)
torch.backends.cudnn.benchmark = False
a = torch.randn(256, 256, device=device)
spd = a @ a.T + 256 * torch.eye(256, device=device)


def show(name: str, value: torch.Tensor) -> None:
    print(name, repr(value.double().sum().item()))


show("cublas", a @ a)
show("cublaslt", torch.nn.functional.linear(a.bfloat16(), a.bfloat16(), a[0].bfloat16()))
show("cudnn", torch.nn.functional.conv2d(a.view(1, 16, 64, 64), torch.randn(8, 16, 3, 3, device=device)))
show("cufft", torch.fft.rfft2(a).abs())
show("cufft3", torch.fft.fftn(torch.randn(30, 31, 37, device=device)).abs())
show("cusolver", torch.linalg.cholesky(spd))
show("cusolver_qr", torch.linalg.qr(a)[1].abs())
show("cusolver_eigh", torch.linalg.eigvalsh(spd))
show("cusolver_svd", torch.linalg.svdvals(a))
whole = torch.randint(-4, 5, (256, 256), device=device).float()  # cuSPARSE adds in no fixed order: such sums are exact
show("cusparse", torch.sparse.mm(whole.relu().to_sparse_csr(), whole))
show("curand", torch.rand(1000, device=device))
if dist.is_nccl_available():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("nccl", rank=0, world_size=1)
    value = a.clone()
    dist.all_reduce(value)
    show("nccl", value)
    dist.destroy_process_group()
