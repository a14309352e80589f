"""Processes that are the ranks of a group and run checks together; kept over many tests: a start takes seconds.

The group speaks gloo between CPUs and, where each rank has a GPU, NCCL between those.

A check is a function of a module on pytest's pythonpath; it runs on every rank, in a process that has a group already.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Of one check. Ranks that wait for one that has failed are ended by then, and the test says which ranks answered.
SECONDS = 90


class RanksFailed(AssertionError):
    """A check failed on a rank, or ranks did not come back."""


class RankPool:
    """``size`` processes with one group over all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, check: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What ``check(*args, **kwargs)`` returns on each rank.

        Raises:
            RanksFailed: with the traceback of every rank that failed; the processes are then started anew.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((check, args, kwargs))
        answers = self._answers()
        failed = {rank: text for rank, (is_ok, text) in answers.items() if not is_ok}
        missing = [rank for rank in range(self.size) if rank not in answers]
        if failed or missing:
            self.close()
            texts = "".join(f"\nrank {rank}:\n{text}" for rank, text in failed.items())
            raise RanksFailed(f"{check.__name__}: ranks without an answer in {SECONDS} s: {missing}{texts}")
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, str(store)), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answers(self) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        pending = dict(zip(self._pipes, range(self.size), strict=True))
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=SECONDS)
        while pending and (left := (deadline - datetime.datetime.now()).total_seconds()) > 0:
            for pipe in wait(list(pending), timeout=left):
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (False, "the process ended")
                if not answers[rank][0]:  # the others may wait for this rank
                    deadline = min(deadline, datetime.datetime.now() + datetime.timedelta(seconds=5))
        return answers


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while True:
        check, args, kwargs = pipe.recv()
        torch._dynamo.reset()
        try:
            pipe.send((True, check(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
