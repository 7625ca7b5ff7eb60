"""Time and memory of a call on the GPU, and calls as CUDA graphs."""

from collections.abc import Callable

import torch


def device_clock(function: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a call by the GPU's clock, the mean of as many calls as fill about two milliseconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def clock(repeats: int) -> float:
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    clock(2)
    repeats = max(1, min(100, round(2e-3 / clock(3))))
    return lambda: clock(repeats)


def peak_device_memory(function: Callable[[], object]) -> float:
    """MiB of GPU memory that a second call needs at its peak, its result included."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """The same call as a CUDA graph, which is replayed; returns what the graph writes to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> object:
        graph.replay()
        return result

    return replay


def synchronised(function: Callable[[], object]) -> Callable[[], object]:
    """For a clock that does not know the GPU."""

    def run() -> object:
        result = function()
        torch.cuda.synchronize()
        return result

    return run
