"""What a run goes past, within limits: images that cannot be read, steps whose loss is no finite number."""

import sys
from contextlib import contextmanager

import torch

from iecl_fast.engine.errors import RunError
from iecl_fast.memory import gather_rows

LISTED = 20  # faults that an error names one by one


class Faults:
    """The faults so far: named on standard error, each once, counted, and too many of them an error.

    Ranks read different images: :meth:`agree` brings what they have found together, and must be called on all.

    Args:
        fabric: launched `lightning_fabric.Fabric`.
        max_unreadable: images that may be unreadable.
        max_skipped: steps that may be left out in a row.

    Attributes:
        unreadable: list of texts, what was wrong with each image; the same on all ranks.
        skipped_steps: int, how many were left out; `skipped_in_a_row` of them since the last one that was not.
    """

    def __init__(self, fabric, *, max_unreadable=0, max_skipped=0):
        self.fabric = fabric
        self.max_unreadable = max_unreadable
        self.max_skipped = max_skipped
        self.unreadable = []
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self._new = []

    def state_dict(self):
        return {
            "unreadable": list(self.unreadable),
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state):
        self.unreadable = list(state["unreadable"])
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]

    def counts(self):
        """The numbers for metrics and results."""
        return {"unreadable_images": len(self.unreadable), "skipped_steps": self.skipped_steps}

    def note(self, texts):
        """Take what `iecl_fast.data.Readable` says of a batch's images: a text for each, empty for a good one."""
        for text in texts:
            self._new += [line for line in text.splitlines() if line not in (*self._new, *self.unreadable)]

    def agree(self):
        """Bring together what the ranks have noted since the last call.

        Raises:
            RunError: more images than allowed; they are listed. On every rank.
        """
        new = self._of_all_ranks(self._new)
        self._new = []
        for text in new:
            if text in self.unreadable:
                continue
            self.unreadable.append(text)
            if self.max_unreadable > 0:
                self._say(f"an image cannot be read and is left out: {text}")
        if len(self.unreadable) > self.max_unreadable:
            lines = self.unreadable[:LISTED] + ["..."] * (len(self.unreadable) > LISTED)
            raise RunError(
                f"{len(self.unreadable)} images cannot be read, data.max_unreadable={self.max_unreadable} are allowed:"
                + "".join(f"\n  {line}" for line in lines)
            )

    def _of_all_ranks(self, texts):
        """The texts of all ranks, in rank order."""
        if self.fabric.world_size == 1:  # in every step: without a tensor, and without waiting for its device
            return texts
        content = "".join(f"{text}\n" for text in texts).encode(errors="surrogateescape")  # as file names have them
        rows = torch.tensor(list(content), dtype=torch.uint8, device=self.fabric.device)
        return bytes(gather_rows(rows).tolist()).decode(errors="surrogateescape").splitlines()

    def skip(self, step):
        """Count a step that is left out because its loss or gradient is no finite number.

        Raises:
            RunError: too many in a row.
        """
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        self._say(f"step {step} is left out, its loss or gradient is no finite number")
        if self.skipped_in_a_row > self.max_skipped:
            raise RunError(
                f"the loss or its gradient is no finite number in {self.skipped_in_a_row} steps in a row up to step "
                f"{step}, trainer.max_skipped={self.max_skipped} are allowed: the training has diverged; try a smaller "
                "optimizer.lr"
            )

    def _say(self, text):
        if self.fabric.is_global_zero:
            print(f"iecl-fast: {text}", file=sys.stderr, flush=True)


@contextmanager
def lost_workers():
    """Context in which the end of a process that loads images is a RunError with advice.

    torch raises RuntimeError for it, when the next batch is asked for or in the middle of anything else.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"a process that loads images has ended: {reason.rstrip('. ')}. The system may have ended it for want of "
            "memory, or of shared memory: try fewer data.workers, or 0 to load in the main process"
        ) from None


@contextmanager
def failed_compilation():
    """Context in which a failure of torch.compile is a RunError with advice, as where no C++ compiler works."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = " ".join(str(error).split())[:300]
        raise RunError(
            f"torch.compile has failed: {type(error).__name__}: {reason}; trainer.compile=false goes on without it"
        ) from None
