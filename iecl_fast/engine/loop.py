"""The steps of a run: batches, losses, the optimiser, the log, and when to write a checkpoint or stop."""

import itertools
import math
import signal
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader

from iecl_fast.data import Readable
from iecl_fast.engine.batches import grouped
from iecl_fast.engine.errors import Interrupted, RunError
from iecl_fast.engine.logging import RunLog
from iecl_fast.engine.pictures import tile
from iecl_fast.engine.schedule import learning_rate
from iecl_fast.evaluate.features import read_batches
from iecl_fast.memory import MemoryBank, MemoryQueue
from iecl_fast.ring import AdaptiveRingSchedule


class Loop:
    """The training of a run.

    Args:
        run: `Run`, begun or restored.
        signals: entered `StopSignals`.
    """

    def __init__(self, run, signals):
        self.run = run
        self.signals = signals
        self.fabric = run.fabric
        self.method = run.method
        self.trainer = run.config.trainer
        self.log = None
        self._first_nan = torch.zeros((), dtype=torch.int64, device=run.fabric.device)
        self._scales = run.fabric.strategy.precision.state_dict() != {}  # the gradient, to float16's range

    def train(self):
        """Take the steps that are left.

        Raises:
            RunError: the loss or a weight is no finite number, or more images cannot be read than allowed.
            Interrupted: a signal came; a checkpoint of that step is written.
        """
        log = nullcontext()
        if self.fabric.is_global_zero:
            log = RunLog(
                self.run.folder,
                step=self.run.step,
                total_steps=self.run.steps.total,
                images_per_step=self.run.steps.batch_size * self.trainer.accumulate,
                progress=self.trainer.progress,
            )
        with log as self.log, self.signals.postponed():
            while self.run.step < self.run.steps.total:
                self._train_epoch()

    def _train_epoch(self):
        """The steps from here to the end of the epoch."""
        run = self.run
        epoch, position = divmod(run.step, run.steps.per_epoch)
        run.views.set_epoch(epoch)
        loader = DataLoader(
            Readable(run.views, run.faults.max_unreadable),
            batch_sampler=run.batches(epoch, start=position * self.trainer.accumulate),
            num_workers=run.config.data.workers,
            pin_memory=self.fabric.device.type == "cuda",
            generator=torch.Generator(),  # its own: a resumed run makes one loader more, which is to draw no number
        )
        for batches in grouped(read_batches(loader), self.trainer.accumulate):
            number = run.step + 1
            ends_epoch = number % run.steps.per_epoch == 0
            logged = number % self.trainer.log_steps == 0 or number in (1, run.steps.total)
            due = self.trainer.checkpoint_steps is not None and number % self.trainer.checkpoint_steps == 0
            self._take_step(batches, number, epoch, logged)
            if self.log is not None:
                self.log.advance()
            stop = self._stop_signal(logged)
            if ends_epoch and run.query_views is not None:
                rows = run.query_views.rows(self.method.saib, self.fabric.device)
                self.log.write_picture(number, "views", tile(rows))
            if stop or due or ends_epoch:
                run.faults.agree()
                self._refuse_nan(weights=True)
                run.save()
            if stop:
                name = signal.Signals(stop).name
                raise Interrupted(stop, f"stopped by {name} after step {number} of {run.steps.total}")

    def _take_step(self, batches, number, epoch, logged):
        """One step and its row of the metrics; a step that is left out has none."""
        rate = self._learning_rate()
        losses = self._optimize(batches, rate)
        if logged or self.fabric.world_size == 1:
            self.run.faults.agree()
        if losses is None:
            self.method.skip_step()
            self.run.faults.skip(number)
        else:
            self.run.faults.skipped_in_a_row = 0
            self._note_nan(losses, number)
            if logged:
                self._refuse_nan()
                self._log(number, epoch + 1, rate, losses)
            self.method.after_step()
            self._adapt_ring(losses)
        self.run.step = number

    def _optimize(self, batches, rate):
        """One optimiser step over `accumulate` batches.

        Returns:
            Their mean losses, a dict of scalar tensors; None when the step is left out (trainer.nan_loss=skip).
        """
        means = {}
        buffers = self._buffers_of_forward() if self.trainer.nan_loss == "skip" else {}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        for group in self.run.optimizer.param_groups:
            group["lr"] = rate
        for number, (views, _, index, texts) in enumerate(batches, start=1):
            self.run.faults.note(texts)
            views = [view.to(self.fabric.device, non_blocking=True) for view in views]
            index = index.to(self.fabric.device, non_blocking=True)
            with self.fabric.no_backward_sync(self.run.wrapped_method, enabled=number < len(batches)):
                losses = self.run.wrapped_method(views, index)
                self.fabric.backward(sum(losses.values()) / len(batches))
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / len(batches)
        if self.trainer.nan_loss == "skip" and not self._is_finite(means):
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
            self.run.wrapped_optimizer.zero_grad()
            return None
        self.run.wrapped_optimizer.step()
        self.run.wrapped_optimizer.zero_grad()
        return means

    def _buffers_of_forward(self):
        """By name, the buffers that a forward pass may change: all but the memories, which wait for the step's end."""
        memories = [module for module in self.method.modules() if isinstance(module, (MemoryQueue, MemoryBank))]
        kept = {id(buffer) for memory in memories for buffer in memory.buffers()}
        return {name: buffer for name, buffer in self.method.named_buffers() if id(buffer) not in kept}

    def _is_finite(self, losses):
        """Whether the losses of all ranks and the gradient are. What overflows by the scaler's factor is its affair."""
        values = torch.stack([loss.float() for loss in losses.values()])
        if not self._scales:
            gradients = [p.grad for p in self.method.parameters() if p.grad is not None]
            values = torch.cat([values, torch.nn.utils.get_total_norm(gradients)[None].float()])
        return self.fabric.all_reduce(values.isfinite().all().logical_not().float(), reduce_op="sum").item() == 0

    def _note_nan(self, losses, number):
        """Note, without waiting for the device, the first step whose loss is no finite number."""
        finite = torch.stack(list(losses.values())).isfinite().all()
        self._first_nan = torch.where(finite | (self._first_nan > 0), self._first_nan, number)

    def _refuse_nan(self, weights=False):
        """Stop a run with a loss, or on demand a weight, that is no finite number: no checkpoint is to hold it.

        On all ranks, whichever noted it.
        """
        bad = self._first_nan
        if weights:
            # Scalars are running means of a loss, which may be NaN before their first value.
            tensors = itertools.chain(self.method.parameters(), self.method.buffers())
            state = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 0]
            finite = torch.stack([tensor.isfinite().all() for tensor in state]).all()
            bad = torch.where(finite | (bad > 0), bad, self.run.step)
        first = int(self.fabric.all_reduce(bad, reduce_op="max"))
        if first > 0:
            raise RunError(
                f"the loss or a weight is no finite number since step {first}: the training has diverged; try a "
                "smaller optimizer.lr, or leave such steps out by trainer.nan_loss=skip"
            )

    def _adapt_ring(self, losses):
        """Tell an adaptive ring the contrastive loss of the step, on all ranks the same. Only then it costs a wait."""
        ring = getattr(self.method, "ring", None)
        if isinstance(ring, AdaptiveRingSchedule):
            loss = sum(loss for name, loss in losses.items() if name.startswith("contrast"))
            ring.observe(self.fabric.all_reduce(loss.float(), reduce_op="mean").item())
            self.method.look_up_step()

    def _log(self, step, epoch, rate, losses):
        """Write a row of the metrics, losses averaged over ranks."""
        stacked = torch.stack([loss.float() for loss in losses.values()])
        parts = self.fabric.all_reduce(stacked, reduce_op="mean").tolist()
        values = {"loss": math.fsum(parts)}
        if len(losses) > 1:
            values |= dict(zip(losses, parts, strict=True))
        if self.log is not None:
            self.log.write(step, epoch, rate, values | self.method.diagnostics() | self.run.faults.counts())

    def _stop_signal(self, logged):
        """The number of a signal that came, to any rank; 0 for none.

        Several ranks ask one another only at logged steps: asking waits.
        """
        received = self.signals.received or 0
        if self.fabric.world_size == 1:
            return received
        if not logged:
            return 0
        return int(self.fabric.all_reduce(torch.tensor(received, device=self.fabric.device), reduce_op="max"))

    def _learning_rate(self):
        return learning_rate(
            self.run.step,
            peak=self.run.config.optimizer.lr,
            schedule=self.run.config.schedule,
            steps_per_epoch=self.run.steps.per_epoch,
            total_steps=self.run.steps.total,
        )
