"""GPU times with the host's cost left out.

`time_alternating` queues a sleep on the GPU, lets the host record every call of a batch behind it,
and only then lets the GPU run: each call is bracketed by CUDA events, so what is measured is the
GPU's own time, however slow Python is. Before each call a buffer larger than L2 is overwritten, so
that no candidate finds its inputs cached. Candidates take turns, a batch each with a short pause
between, so that a drift of clock or temperature meets all of them; the median over calls is kept.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

# An upper bound of the SM clock: a sleep sized by it is never shorter than asked for.
CLOCK_HZ = 2.1e9


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    median: float
    low: float  # 20th percentile
    high: float  # 80th percentile
    calls: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered),
            ordered[round(0.2 * last)],
            ordered[round(0.8 * last)],
            len(ordered),
        )


def l2_flush_buffer() -> torch.Tensor:
    """Twice the L2 of the current device; `zero_()` evicts whatever was cached."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(2 * size, dtype=torch.uint8, device="cuda")


def _timed_batch(
    call: Callable[[], object], calls: int, sleep_s: float, flush: torch.Tensor
) -> tuple[list[float], bool]:
    """One batch: its times in ms, and whether the host stayed ahead of the GPU throughout."""
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
    gate = torch.cuda.Event()
    torch.cuda._sleep(int(sleep_s * CLOCK_HZ))
    gate.record()
    for begin, end in zip(begins, ends, strict=True):
        flush.zero_()
        begin.record()
        call()
        end.record()
    host_ahead = not gate.query()
    torch.cuda.synchronize()
    return [b.elapsed_time(e) for b, e in zip(begins, ends, strict=True)], host_ahead


def _host_seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def time_alternating(
    candidates: dict[str, Callable[[], object]],
    *,
    rounds: int = 4,
    calls: int = 4,
    warmup: int = 2,
    pause_s: float = 0.01,
) -> dict[str, Timing]:
    """Median GPU milliseconds of each candidate over `rounds * calls` calls, in turns."""
    flush = l2_flush_buffer()
    sleep_s = {}
    for name, call in candidates.items():
        for _ in range(warmup):
            call()
        sleep_s[name] = 1.5 * calls * (_host_seconds(call) + 20e-6) + 2e-4
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            time.sleep(pause_s)
            for _attempt in range(6):
                times, host_ahead = _timed_batch(call, calls, sleep_s[name], flush)
                if host_ahead:
                    break
                sleep_s[name] *= 2
            else:
                raise RuntimeError(
                    f"{name}: the host could not queue {calls} calls ahead of the GPU; "
                    "does the call synchronise?"
                )
            samples[name] += times
    return {name: Timing.of(times) for name, times in samples.items()}


def wall_alternating(
    candidates: dict[str, Callable[[], object]],
    *,
    rounds: int = 10,
    calls: int = 3,
    warmup: int = 3,
    synchronize: Callable[[], object] = torch.cuda.synchronize,
) -> dict[str, float]:
    """Wall milliseconds of one call: the median over rounds of `calls` calls, candidates in turns.

    For what launches more kernels than the host can queue ahead, or waits for the GPU itself.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        for _ in range(warmup):
            call()
    for _ in range(rounds):
        for name, call in candidates.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize()
            samples[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


@dataclasses.dataclass(frozen=True)
class HostCall:
    """A call, and the context to hold around each loop over it."""

    call: Callable[[], object]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def host_microseconds(
    candidates: dict[str, HostCall],
    *,
    rounds: int = 15,
    calls: int = 200,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Host microseconds of one call: the median over rounds of `calls` calls, candidates in turns.

    The calls must be tiny, so that the GPU keeps up and the host never waits for a full queue.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(-1, rounds):  # round -1 warms up
        for name, candidate in candidates.items():
            call = candidate.call
            with candidate.context():
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                seconds = time.perf_counter() - start
            if round_ >= 0:
                samples[name].append(seconds / calls * 1e6)
    synchronize()
    return {name: statistics.median(times) for name, times in samples.items()}
