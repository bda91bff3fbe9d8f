"""Train an optimized ResNet, in one process or in several under `torchrun`; what was killed goes on where it was.

    python examples/train.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train.py --checkpoint /tmp/resnet.pt
    python -m torch.distributed.launch --nproc-per-node 2 examples/train.py
    srun --ntasks 2 python examples/train.py          (with MASTER_ADDR and MASTER_PORT)
    python examples/train.py --model mine:made        (a model and data of your own)

Everything that a training script holds meets the optimized model here: a `DistributedSampler` with an uneven last
batch, pinned memory, gradient accumulation without needless synchronization, a learning-rate schedule, a `GradScaler`
(float16 on a GPU), seeds, `cudnn.benchmark`, checkpoints, a progress bar. Checkpoints hold the names of the plain
model: what one process wrote, two can go on with, and a model that was never optimized loads them.
"""

from __future__ import annotations

import argparse
import math
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import fxopt

SEED, CLASSES, IMAGES, BATCH, ACCUMULATED = 0, 4, 116, 8, 2
"""A batch is what all processes see in one forward; a step of the optimizer takes several of them."""


PATIENCE = timedelta(minutes=2)
"""How long a process waits for another before it fails, and all start again: half an hour if nothing is said."""


Made = tuple[nn.Module, Dataset[tuple[Tensor, ...]]]
"""A model, and what it learns from: pairs of an input and the number of its class."""


def resnet() -> Made:
    """Return a small ResNet, and images for it."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=CLASSES, **sizes)), images()


def images() -> TensorDataset:
    """Return images [3, 16, 16] whose class is the corner that is bright."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    pictures = torch.randn(IMAGES, 3, 16, 16, generator=generator)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        row, column = 8 * (label // 2), 8 * (label % 2)
        picture[:, row : row + 8, column : column + 8] += 1.0
    return TensorDataset(pictures, labels)


class Training:
    """The model, what trains it, and how far it is.

    Args:
        made: the model, and its data.
        passes: of fxopt, as a pipeline; "" trains the plain model.
        epochs: how many there will be, for the learning rate.
        checkpoint: the file to resume from, and to write to; None: neither.
    """

    def __init__(self, made: Made, passes: str, epochs: int, checkpoint: Path | None) -> None:
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.world = distributed.get_world_size() if distributed.is_initialized() else 1
        self.device = torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        model, self.data = made
        self.sampler = DistributedSampler(self.data, self.world, self.rank, seed=SEED)  # type: ignore[arg-type]
        on_gpu = self.device.type == "cuda"
        self.loader = DataLoader(self.data, batch_size=BATCH // self.world, sampler=self.sampler, pin_memory=on_gpu)
        model = model.to(self.device)
        example = torch.stack([self.data[number][0] for number in range(BATCH // self.world)]).to(self.device)
        self.model = fxopt.optimize(model, passes, example_inputs=example) if passes else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = math.ceil(len(self.sampler) / (BATCH // self.world))
        steps = epochs * math.ceil(self.batches / ACCUMULATED)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=steps)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=on_gpu)
        self.checkpoint, self.epoch, self.batch, self.total = checkpoint, 0, 0, torch.zeros(2)
        if checkpoint is not None and checkpoint.exists():
            self.resume(checkpoint)

    # -- an epoch --------------------------------------------------------------------------------------------------

    def run(self) -> float:
        """Train for the rest of an epoch; return the mean loss of its images."""
        self.sampler.set_epoch(self.epoch)
        for number, (pictures, labels) in self.unseen():
            last = (number + 1) % ACCUMULATED == 0 or number + 1 == self.batches
            torch.manual_seed(hash((SEED, self.epoch, number, self.rank)))  # what is drawn depends on the place alone
            pictures, labels = (tensor.to(self.device, non_blocking=True) for tensor in (pictures, labels))
            of_step = min(ACCUMULATED, self.batches - number // ACCUMULATED * ACCUMULATED)
            with nullcontext() if last else fxopt.no_sync(self.model):  # gradients add up before they are exchanged
                loss = self.loss(pictures, labels)
                self.scaler.scale(loss / of_step).backward()
            self.total += torch.tensor([loss.item() * len(labels), len(labels)])
            if last:
                self.step()
                self.batch = number + 1
                self.save()
        mean = self.mean_loss()
        self.epoch, self.batch, self.total = self.epoch + 1, 0, torch.zeros(2)
        return mean

    def unseen(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield the batches of the epoch that were not trained on yet, with their numbers."""
        bar = track(self.loader, f"epoch {self.epoch}", transient=True, disable=self.rank != 0)
        yield from ((number, batch) for number, batch in enumerate(bar) if number >= self.batch)

    def loss(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy."""
        with torch.autocast(self.device.type, torch.float16, enabled=self.scaler.is_enabled()):
            output = self.model(pictures)
            return F.cross_entropy(getattr(output, "logits", output), labels)

    def step(self) -> None:
        """Change the weights, and the learning rate with them."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()

    def mean_loss(self) -> float:
        """Return the mean loss over the images of all processes in this epoch."""
        total = self.total.clone()
        if distributed.is_initialized():
            distributed.all_reduce(total)
        return float(total[0] / total[1])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint, whole or not at all: rank 0 writes, and the others wait."""
        if self.checkpoint is None:
            return
        totals = [torch.zeros(2) for _ in range(self.world)]
        if distributed.is_initialized():
            distributed.all_gather(totals, self.total)
        else:
            totals = [self.total]
        if self.rank == 0:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "scaler": self.scaler.state_dict(),
                "place": (self.epoch, self.batch, torch.stack(totals)),
            }
            fresh = self.checkpoint.with_suffix(".new")
            torch.save(state, fresh)
            fresh.replace(self.checkpoint)

    def resume(self, checkpoint: Path) -> None:
        """Go on where a checkpoint was written."""
        state = torch.load(checkpoint, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.batch, totals = state["place"]
        self.total = totals[self.rank]


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def named_as_by_torchrun() -> None:
    """Give the variables of a SLURM step the names that torchrun has for them, where it did not start this process."""
    if "WORLD_SIZE" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) == 1:
        return
    names = {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID", "MASTER_ADDR": "LAUNCH_NODE_IPADDR"}
    for name, of_slurm in names.items():
        if name not in os.environ:
            os.environ[name] = os.environ[f"SLURM_{of_slurm}"]
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10000))


def join(backend: str) -> None:
    """Initialize the process group; after a restart torchrun's store still holds the addresses of those that are gone.

    See issue 135712 of PyTorch. On several nodes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead.
    """
    store, rank, size = next(distributed.rendezvous("env://", timeout=PATIENCE))
    fresh = distributed.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    fresh.set_timeout(PATIENCE)
    fresh.set(f"here/{rank}", "")
    for other in range(size):
        try:
            fresh.wait([f"here/{other}"])
        except RuntimeError as error:
            raise SystemExit(f"rank {rank}: rank {other} did not start within {PATIENCE}") from error
    distributed.init_process_group(backend, timeout=PATIENCE, store=fresh, rank=rank, world_size=size)


def main(
    passes: str | None = None, epochs: int = 4, checkpoint: Path | None = None, make: Callable[[], Made] = resnet
) -> list[float]:
    """Train, print and return the mean loss of each epoch that ran."""
    named_as_by_torchrun()
    joins = "WORLD_SIZE" in os.environ
    if joins:
        join("nccl" if torch.cuda.is_available() else "gloo")
    torch.backends.cudnn.benchmark = True
    several = joins and distributed.get_world_size() > 1
    with fxopt.ending_together():  # where one process fails, the others say which
        chosen = ("distributed" if several else "training") if passes is None else passes
        losses = train(make, chosen, epochs, checkpoint)
    if joins:
        distributed.destroy_process_group()
    return losses


def train(make: Callable[[], Made], passes: str, epochs: int, checkpoint: Path | None) -> list[float]:
    """Train a new model."""
    torch.manual_seed(SEED)  # the same in every process
    training = Training(make(), passes, epochs, checkpoint)
    losses: list[float] = []
    while training.epoch < epochs:
        losses.append(training.run())
        if training.rank == 0:
            print(f"epoch {training.epoch}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--passes", help="of fxopt, as a pipeline; '' for the plain model")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, help="written after each step, and resumed from if it is there")
    parser.add_argument(
        "--model", dest="make", type=pkgutil.resolve_name, default=resnet, metavar="PACKAGE:FACTORY",
        help="a function without arguments, such as mine:made for `def made()` in mine.py. It returns (model, data): "
        "an nn.Module, and a Dataset of pairs (input, number of the class); model(inputs) gives logits, or has .logits",
    )  # fmt: skip
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # torch.distributed.launch gives it
    arguments = vars(parser.parse_args())
    given = arguments.pop("local_rank")
    if given is not None:
        os.environ.setdefault("LOCAL_RANK", str(given))
    main(**arguments)
