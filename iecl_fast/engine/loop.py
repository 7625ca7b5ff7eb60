"""The steps of a run: batches, losses, the optimiser, the log, and when to write a checkpoint or stop."""

import math
import signal

import torch
from torch.utils.data import DataLoader

from iecl_fast.engine.batches import grouped
from iecl_fast.engine.errors import Interrupted, RunError
from iecl_fast.engine.logging import RunLog
from iecl_fast.engine.pictures import tile
from iecl_fast.engine.schedule import learning_rate
from iecl_fast.evaluate.features import read_batches
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

    def train(self):
        """Take the steps that are left."""
        log = None
        if self.fabric.is_global_zero:
            log = RunLog(
                self.run.folder,
                step=self.run.step,
                total_steps=self.run.total_steps,
                images_per_step=self.run.batches(epoch=0, start=0).batch_size * self.trainer.accumulate,
                progress=self.trainer.progress,
            )
        try:
            with self.signals.postponed():
                while self.run.step < self.run.total_steps:
                    self._train_epoch(log)
        finally:
            if log is not None:
                log.close()

    def _train_epoch(self, log):
        """The steps from here to the end of the epoch."""
        epoch, position = divmod(self.run.step, self.run.steps_per_epoch)
        self.run.views.set_epoch(epoch)
        loader = DataLoader(
            self.run.views,
            batch_sampler=self.run.batches(epoch, start=position * self.trainer.accumulate),
            num_workers=self.run.config.data.workers,
            pin_memory=self.fabric.device.type == "cuda",
            generator=torch.Generator(),  # its own: a resumed run makes one loader more, which is to draw no number
        )
        for batches in grouped(read_batches(loader), self.trainer.accumulate):
            rate = self._learning_rate()
            losses = self._optimize(batches, rate)
            number = self.run.step + 1
            logged = number % self.trainer.log_steps == 0 or number in (1, self.run.total_steps)
            if logged:
                self._log(log, number, epoch + 1, rate, losses)
            self.method.after_step()
            self._adapt_ring(losses)
            self.run.step = number
            if log is not None:
                log.advance()
            stop = self._must_stop(logged)
            due = self.trainer.checkpoint_steps is not None and number % self.trainer.checkpoint_steps == 0
            if number % self.run.steps_per_epoch == 0 and self.run.query_views is not None:
                rows = self.run.query_views.rows(self.method.saib, self.fabric.device)
                log.write_picture(number, "views", tile(rows))
            if stop or due or number % self.run.steps_per_epoch == 0:
                self.run.save()
            if stop:
                signal_number = self.signals.received or signal.SIGTERM
                name = signal.Signals(signal_number).name
                raise Interrupted(signal_number, f"stopped by {name} after step {number} of {self.run.total_steps}")

    def _optimize(self, batches, rate):
        """One optimiser step over `accumulate` batches. Returns their mean losses, a dict of scalar tensors."""
        means = {}
        for group in self.run.optimizer.param_groups:
            group["lr"] = rate
        for number, (views, _, index) in enumerate(batches, start=1):
            views = [view.to(self.fabric.device, non_blocking=True) for view in views]
            index = index.to(self.fabric.device, non_blocking=True)
            with self.fabric.no_backward_sync(self.run.wrapped_method, enabled=number < len(batches)):
                losses = self.run.wrapped_method(views, index)
                self.fabric.backward(sum(losses.values()) / len(batches))
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / len(batches)
        self.run.wrapped_optimizer.step()
        self.run.wrapped_optimizer.zero_grad()
        return means

    def _adapt_ring(self, losses):
        """Tell an adaptive ring the contrastive loss of the step, on all ranks the same. Only then it costs a wait."""
        ring = getattr(self.method, "ring", None)
        if isinstance(ring, AdaptiveRingSchedule):
            loss = sum(loss for name, loss in losses.items() if name.startswith("contrast"))
            ring.observe(self.fabric.all_reduce(loss.float(), reduce_op="mean").item())

    def _log(self, log, step, epoch, rate, losses):
        """Write a row of the metrics, losses averaged over ranks, and stop a run whose loss is no number any more."""
        stacked = torch.stack([loss.float() for loss in losses.values()])
        parts = self.fabric.all_reduce(stacked, reduce_op="mean").tolist()
        values = {"loss": math.fsum(parts)}
        if len(losses) > 1:
            values |= dict(zip(losses, parts, strict=True))
        if not math.isfinite(values["loss"]):
            raise RunError(
                f"the loss is {values['loss']} at step {step}: the training has diverged; "
                f"try a smaller optimizer.lr. The last checkpoint is {self.run.folder.checkpoint}"
            )
        if log is not None:
            log.write(step, epoch, rate, values | self.method.diagnostics())

    def _must_stop(self, logged):
        """Whether a signal came, to any rank. Several ranks ask one another only at logged steps: asking waits."""
        stop = self.signals.received is not None
        if self.fabric.world_size == 1:
            return stop
        if not logged:
            return False
        stops = self.fabric.all_reduce(torch.tensor(float(stop), device=self.fabric.device), reduce_op="sum")
        return stops.item() > 0

    def _learning_rate(self):
        return learning_rate(
            self.run.step,
            peak=self.run.config.optimizer.lr,
            schedule=self.run.config.schedule,
            steps_per_epoch=self.run.steps_per_epoch,
            total_steps=self.run.total_steps,
        )
