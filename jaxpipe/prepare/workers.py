"""Work in several processes, its results in the order of what came in."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from jaxpipe.errors import DataError
from jaxpipe.prepare.encoding import Block, Encoder, Job
from jaxpipe.prepare.reading import Part

_WAITING = 2  # blocks that wait for each process, and as many results

_encoder: Encoder  # of this process


def encode_blocks(blocks: Iterable[list[Part]], job: Job, *, num_workers: int) -> Iterator[Block]:
    """The tokens of `blocks`, in order.

    Args:
        blocks: read as they are needed, a few ahead.
        job: how they are encoded.
        num_workers: processes; 1 is this one.

    Raises:
        DataError: of the first block that has one, or a process was killed.
    """
    if num_workers == 1:
        yield from map(Encoder(job), blocks)
        return
    # Not forked: this process has threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(job,))
    try:
        waiting = deque()
        for block in blocks:
            waiting.append(pool.submit(_encode, block))
            if len(waiting) > _WAITING * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {num_workers} processes ended before its work\n"
            "  rule workers: every process encodes its blocks\n"
            f"      {error}\n"
            "  repair: look whether the machine ran out of memory, and set a smaller --num_workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(job: Job) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends all
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many processes as cores, so one thread in each
    _encoder = Encoder(job)


def _encode(parts: list[Part]) -> Block:
    return _encoder(parts)
