"""Two ranks make the gradient of one: each divides by the global number of targets, and the sums are added."""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distill.collate import collate
from distill.dataloader import pad
from distill.losses import build_loss
from distill.records import select
from distill.student import Student, StudentSpec
from tests.helpers import make_records, make_samples
from tests.toys import make_model_folder


def gradient(folder: Path, rows: slice) -> list[torch.Tensor]:
    """Gradients of the loss over the given of six samples, divided by the targets of all six."""
    samples = make_samples(6, length=20)
    ends = np.cumsum([len(sample.targets) for sample in samples])
    mine = range(6)[rows]
    first, last = int(ends[mine[0]] - len(samples[mine[0]].targets)), int(ends[mine[-1]])
    student = Student(StudentSpec(folder, "fp32", "cpu", 261, grad_checkpointing=False, trust_remote_code=False))
    tokens = collate(samples[rows])
    targets = pad(select(make_records(samples), np.arange(first, last)), tokens.labels)
    student.loss(tokens, targets, build_loss("kl"), scale=1 / int(ends[-1])).backward()
    return [parameter.grad for parameter in student.parameters()]


def rank_main(rank: int, folder: Path, work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)
    mine = gradient(folder, slice(0, 2) if rank == 0 else slice(2, 6))
    for grad in mine:
        dist.all_reduce(grad)
    if rank == 0:
        torch.save(mine, work / "sum.pt")
    dist.destroy_process_group()


def test_two_ranks_make_the_gradient_of_one(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "student", seed=0, hidden=16, layers=1)
    with tempfile.TemporaryDirectory() as work:
        mp.spawn(rank_main, (folder, Path(work)), nprocs=2)
        summed = torch.load(Path(work) / "sum.pt", weights_only=True)
    for got, expected in zip(summed, gradient(folder, slice(0, 6)), strict=True):
        assert torch.allclose(got, expected, atol=1e-6)
