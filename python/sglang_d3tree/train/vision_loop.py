"""A training loop that can be killed at any time and carries on from its last checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

StepFunction = Callable[[int], tuple[Tensor, dict[str, float]]]
"""step -> (loss, numbers worth logging)"""


def schedule(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(progress * math.pi))


def save_atomically(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    torch.save(state, scratch)
    scratch.replace(path)


def _average(parameters: list[nn.Parameter], late: bool, world: int) -> bool:
    """Average the gradients over the processes; returns whether any of them is late, the same answer in each."""
    if world == 1:
        return late
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads] + [torch.tensor([float(late)])])
    torch.distributed.all_reduce(flat)
    flat /= world
    for grad, mean in zip(grads, flat.split([g.numel() for g in grads] + [1]), strict=False):
        grad.copy_(mean.view_as(grad))
    return bool(flat[-1] > 0)


class OutOfTimeError(Exception):
    """The deadline passed; the checkpoint is written."""


def train(
    path: Path,
    modules: dict[str, nn.Module],
    learning_rates: dict[str, float],
    steps: int,
    step_function: StepFunction,
    *,
    deadline: float | None = None,
    save_seconds: float = 120,
    log_every: int = 10,
) -> None:
    """Trains `modules` (those with a learning rate) to `steps` with AdamW; returns at once if they are done.

    path: the checkpoint, {module name: state, "optimizer", "step"}; numbers go to the .log beside it. Under torchrun
    every process runs steps of its own, gradients are averaged, and the first process writes.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    groups = [
        {"params": list(modules[name].parameters()), "lr": rate, "peak": rate} for name, rate in learning_rates.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
    parameters = [p for group in groups for p in group["params"]]  # type: ignore[attr-defined]
    start = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        for name, module in modules.items():
            module.load_state_dict(state[name])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    def save(step: int) -> None:
        state = {name: module.state_dict() for name, module in modules.items()}
        save_atomically({**state, "optimizer": optimizer.state_dict(), "step": step}, path)

    average: dict[str, float] = {}
    saved = time.time()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".log").open("a") as log:
        bar = tqdm(
            range(start, steps), initial=start, total=steps, mininterval=30, desc=path.stem, disable=rank > 0
        )
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(step, steps, warmup=min(100, steps // 20 + 1))
            loss, numbers = step_function(step * world + rank)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            late = _average(parameters, deadline is not None and time.time() > deadline, world)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            for name, value in {"loss": loss.item(), **numbers}.items():
                if not math.isnan(value):
                    average[name] = 0.95 * average.get(name, value) + 0.05 * value
            if rank == 0 and (step + 1) % log_every == 0:
                line = " ".join(f"{name} {value:.3f}" for name, value in average.items())
                log.write(f"{time.strftime('%H:%M:%S')} step {step + 1} {line}\n")
                log.flush()
            if rank == 0 and (time.time() - saved > save_seconds or step + 1 == steps or late):
                save(step + 1)
                saved = time.time()
            if late and step + 1 < steps:
                raise OutOfTimeError
