"""Random programs on many processes whose ranks are delayed, and differ in all that the program's
text does not say: every rank must get the values of one process.

    python -m test.sweeps.schedules [--schedules 500] [--processes 2..8] [--seed 0] [--minutes 20]

A schedule is a program, the same on all ranks, and what happens to each rank beside it. Programs
mix sharded tensors, tensors of each rank's own, reads, steps, collectives of torch.distributed,
sharded training, captured steps, and DDP. Beside them a rank sleeps (between statements, before it
compiles, runs a step, or exchanges anything), forgets its programs, runs Python's collector or has
it switched off, keeps tensors longer than others, and computes and reads values of its own.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import torch_hlo
from test.device import ranks
from test.sweeps import counted
from torch_hlo import config
from torch_hlo.device.process_group import ProcessLink
from torch_hlo.distributed import Mesh, mark_sharding
from torch_hlo.lazy.record import session
from torch_hlo.lazy.run.executor import Job
from torch_hlo.lazy.run.program_cache import ProgramCache

BATCH = 20  # schedules that the same processes run
SIZE = 8  # of all dimensions: divided by some numbers of processes, and not by others


class Ring:
    """Lives until the collector comes."""

    def __init__(self, value: object) -> None:
        self.value, self.me = value, self


class Rank:
    """What happens to one rank beside the program; `rng` is its own."""

    def __init__(self, rng: random.Random, rank: int) -> None:
        self.rng, self.rank = rng, rank
        self.slow = rng.choice((0.0, 0.002, 0.01))
        self.kept: list[object] = []
        self.collects = rng.random() < 0.7

    def nap(self, chance: float = 0.2) -> None:
        if self.rng.random() < chance:
            time.sleep(self.rng.random() * self.slow)

    def between(self, value: object) -> None:
        """Between two statements."""
        self.nap()
        what = self.rng.random()
        if what < 0.1:
            self.kept.append(value)
        elif what < 0.15:
            gc.collect()
        elif what < 0.2:
            session.engine().clear_cache()
        elif what < 0.25:
            own = torch.arange(4.0).to("hlo") * self.rank
            assert (own.flip(0) + 1).sum().item() == 6.0 * self.rank + 4
        elif what < 0.3:
            self.kept.clear()

    def slowed(self, owner: type, name: str) -> mock._patch:
        """A method that begins when it likes."""
        method = getattr(owner, name)

        def late(*args: object, **kwargs: object) -> object:
            self.nap(0.1)
            return method(*args, **kwargs)

        return mock.patch.object(owner, name, late)


class Program:
    """Random statements on pairs of tensors: of the device, and what one process computes. All
    ranks choose the same with `rng`."""

    def __init__(self, rng: random.Random, rank: Rank, world: int) -> None:
        self.rng, self.rank, self.world = rng, rank, world
        shape = (world,) if world % 2 or rng.random() < 0.5 else (2, world // 2)
        self.mesh = Mesh(shape, ("x", "y")[: len(shape)])
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(3):
            self.make()

    def spec(self, rank: int) -> tuple[str | None, ...]:
        axes = self.rng.sample([*self.mesh.axis_names, *[None] * rank], rank)
        return tuple(axes)

    def pick(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rng.choice(self.pairs)

    def add(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self.pairs.append((device, host))
        if len(self.pairs) > 6:
            Ring(self.pairs.pop(self.rng.randrange(3)))
        self.rank.between(device)

    def make(self) -> None:
        host = torch.randn(SIZE, SIZE)
        device = host.to("hlo")
        if self.rng.random() < 0.7:
            mark_sharding(device, self.mesh, self.spec(2))
        self.add(device, host)

    def compute(self) -> None:
        (a, x), (b, y) = self.pick(), self.pick()
        function = self.rng.choice(FUNCTIONS)
        self.add(function(a, b), function(x, y))

    def write(self) -> None:
        (a, x), (b, y) = self.pick(), self.pick()
        if a is not b:
            function = self.rng.choice(WRITES)
            function(a, b)
            function(x, y)
        self.rank.between(b)

    def annotate(self) -> None:
        a, x = self.pick()
        c = torch.sigmoid(a)
        mark_sharding(c, self.mesh, self.spec(2))
        self.add(c, torch.sigmoid(x))

    def step(self) -> None:
        self.rng.choice((torch_hlo.mark_step, torch_hlo.sync))()
        self.rank.between(None)

    def read(self) -> None:
        a, x = self.pick()
        close(a.cpu(), x)
        self.rank.between(a)

    def number(self) -> None:
        a, x = self.pick()
        close(torch.tensor((a @ a).mean().item()), (x @ x).mean())
        self.rank.between(a)

    def number_of_one(self) -> None:
        """One rank alone reads a number that all have whole, and that has been computed."""
        a, x = self.pick()
        total = a.mean()
        torch_hlo.mark_step()
        if self.rng.randrange(self.world) == self.rank.rank:
            close(total.cpu(), x.mean())

    def total(self) -> None:
        """A collective of torch.distributed, of which some ranks read the result at once."""
        own = torch.arange(3.0).to("hlo") + self.rank.rank
        dist.all_reduce(own)
        host = torch.arange(3.0) * self.world + sum(range(self.world))
        if self.rank.rng.random() < 0.5:
            close(own.cpu(), host)
        if self.rng.random() < 0.5:
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            self.rank.between(own)

    def train(self) -> None:
        """Sharded training, of a captured step or not."""
        models = model_pair(self.rng)
        mark_sharding(models[0][0].weight, self.mesh, self.spec(2))
        spec = (self.rng.choice(self.mesh.axis_names), None)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
        captured = torch_hlo.compile(train_step) if self.rng.random() < 0.3 else train_step
        for _ in range(self.rng.randint(1, 3)):
            host = torch.randn(SIZE, SIZE)
            device = mark_sharding(host.to("hlo"), self.mesh, spec)
            loss = captured(models[0], optimizers[0], device)
            want = train_step(models[1], optimizers[1], host)
            self.rank.between(loss)
            if self.rng.random() < 0.7:
                torch_hlo.mark_step()
                self.rank.between(loss)
            if self.rng.random() < 0.5:
                close(torch.tensor(loss.item()), want)
        close(models[0][0].weight.cpu(), models[1][0].weight)

    def ddp(self) -> None:
        """Training on each rank's own data: each ends steps and reads the loss when it likes, since
        nothing is pending on the mesh."""
        torch_hlo.mark_step()
        models = model_pair(self.rng)
        model = nn.parallel.DistributedDataParallel(models[0])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for _ in range(2):
            host = torch.randn(self.world, 4, SIZE)
            loss = train_step(model, optimizers[0], host[self.rank.rank].to("hlo"))
            train_step(models[1], optimizers[1], host.flatten(0, 1))
            if self.rank.rng.random() < 0.5:
                torch_hlo.mark_step()
            if self.rank.rng.random() < 0.3:
                loss.item()
            self.rank.between(loss)
        close(models[0][0].weight.cpu(), models[1][0].weight)


STATEMENTS: dict[Callable[[Program], None], int] = {
    Program.make: 2, Program.compute: 8, Program.write: 3, Program.annotate: 2, Program.step: 3,
    Program.read: 2, Program.number: 2, Program.number_of_one: 1, Program.total: 2,
    Program.train: 1, Program.ddp: 1,
}  # fmt: skip

FUNCTIONS = (
    lambda a, b: a @ b / SIZE,
    lambda a, b: torch.tanh(a + b),
    lambda a, b: a.t() * b.softmax(-1),
    lambda a, b: a - b.mean(0, keepdim=True),
    lambda a, b: torch.cat([a[:3], b[3:]]),
    lambda a, b: torch.where(b.sum(1, keepdim=True) > 0, a.relu(), a),
)
WRITES = (
    lambda a, b: a.mul_(0.5),
    lambda a, b: a.add_(b, alpha=0.25),
    lambda a, b: a[2:5].copy_(b[:3]),
    lambda a, b: a.clamp_(-1, 1),
)


def model_pair(rng: random.Random) -> tuple[nn.Sequential, nn.Sequential]:
    """The same model on the device and on the CPU."""
    hosts = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 2)) for _ in range(2)]
    hosts[1].load_state_dict(hosts[0].state_dict())
    return hosts[0].to("hlo"), hosts[1]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach(), want.detach(), rtol=1e-3, atol=1e-4)


def run_schedule(seed: int, rank: int, world: int) -> None:
    """One schedule on this rank. Raises AssertionError for a wrong value, CollectiveError where the
    ranks do not meet."""
    rng = random.Random(f"{seed} of {world}")
    torch.manual_seed(seed)
    beside = Rank(random.Random(f"{seed} of {world}, {rank}"), rank)
    most = rng.choice((20000, 20000, 9))
    slowed = [
        (ProgramCache, "_compile"), (Job, "run"), (ProcessLink, "start"), (ProcessLink, "gather"),
    ]  # fmt: skip
    patches = [beside.slowed(owner, name) for owner, name in slowed]
    if not beside.collects:
        gc.disable()
    try:
        for patch in patches:
            patch.start()
        with config.override(MAX_NODES=most):
            session.current().limit = most
            program = Program(rng, beside, world)
            kinds, weights = list(STATEMENTS), list(STATEMENTS.values())
            for statement in rng.choices(kinds, weights, k=rng.randint(5, 11)):
                statement(program)
            for device, host in program.pairs:
                close(device.cpu(), host)
            torch_hlo.sync()  # a rank that goes on would leave recorded collectives behind
    finally:
        for patch in patches:
            patch.stop()
        gc.enable()


def run_batch(rank: int, world: int, seeds: list[int]) -> int:
    """In a process: how many schedules it ran."""
    torch.set_num_threads(1)
    for seed in seeds:
        try:
            run_schedule(seed, rank, world)
        except BaseException as error:
            raise RuntimeError(f"schedule {seed}: {type(error).__name__}: {error}") from error
        dist.monitored_barrier(timeout=timedelta(seconds=60))
    return len(seeds)


def failures(world: int, seeds: list[int], limit: float = 600.0) -> list[str]:
    """What went wrong when `world` processes ran these schedules."""
    flags = {"COLLECTIVE_TIMEOUT": 60.0, "THREADS": 1}
    outcomes = ranks.run(world, run_batch, world, seeds, limit=limit, **flags)
    return [
        f"{world} processes, rank {rank}: {o.error}" for rank, o in enumerate(outcomes) if o.error
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--processes", default="2..8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args()
    lowest, _, highest = options.processes.partition("..")
    worlds = range(int(lowest), int(highest or lowest) + 1)
    end = time.monotonic() + 60 * options.minutes
    done = bad = 0
    batches = range(0, options.schedules, BATCH)
    for number, first in enumerate(counted("schedules, batch", batches)):
        if time.monotonic() > end:
            break
        world = worlds[number % len(worlds)]
        seeds = [options.seed + i for i in range(first, min(first + BATCH, options.schedules))]
        start = time.monotonic()
        found = failures(world, seeds)
        done, bad = done + len(seeds), bad + bool(found)
        seconds = time.monotonic() - start
        print(f"{world} processes: {len(seeds)} schedules in {seconds:.0f} s", flush=True)
        print("\n".join(found), end="\n" if found else "", flush=True)
    print(f"{done} schedules, {bad} batches with failures")
    return 1 if bad or done < options.schedules else 0


if __name__ == "__main__":
    sys.exit(main())
