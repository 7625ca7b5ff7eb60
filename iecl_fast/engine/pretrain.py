"""Pretraining: one run from its configuration to its result, and from a checkpoint on.

Lightning Fabric places the model, sets the precision, and synchronises ranks; everything else of the loop is here.
"""

import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader

from iecl_fast.engine import build
from iecl_fast.engine.batches import EpochBatches, grouped
from iecl_fast.engine.checkpoint import get_rng_state, load_checkpoint, load_part, save_checkpoint, set_rng_state
from iecl_fast.engine.curves import draw_curves
from iecl_fast.engine.environment import record_environment
from iecl_fast.engine.errors import Interrupted, RunError, UsageError
from iecl_fast.engine.folder import find_folder, write_json
from iecl_fast.engine.logging import RunLog
from iecl_fast.engine.pictures import QueryViews, draw_views, tile
from iecl_fast.engine.plan import count_steps
from iecl_fast.engine.processes import launch_fabric, seed_rank
from iecl_fast.engine.schedule import learning_rate
from iecl_fast.engine.signals import StopSignals
from iecl_fast.evaluate.features import read_batches
from iecl_fast.evaluate.protocols import PROTOCOLS, measure
from iecl_fast.ring import AdaptiveRingSchedule


def pretrain(config, resume=None):
    """Train an encoder and measure its features before and after.

    Args:
        config: `Config`.
        resume: an existing run folder to go on with, or None for a new one.

    Returns:
        (`RunFolder`, the dict that its result.json holds). A finished run that is resumed is only reported.

    Raises:
        UsageError: the folder is in the way, the configuration is not the saved one, a part refuses its options.
        RunError: the loss is no number any more, an image cannot be read.
        Interrupted: SIGINT or SIGTERM came; a checkpoint is written.
    """
    with build.threads(config.trainer), StopSignals() as signals:
        fabric = launch_fabric(config.trainer)
        folder = _on_rank_zero(fabric, lambda: find_folder(config, resume))
        result = _on_rank_zero(fabric, lambda: folder.read_result() if folder.result.exists() else None)
        if result is not None:
            return folder, result
        config = replace(config, output=str(folder.path))
        run = Pretraining(config, fabric, folder, signals)  # nothing is written before all parts are there
        _on_rank_zero(fabric, lambda: _prepare_folder(folder, config, fabric))
        try:
            run.restore_or_begin()
            run.train()
            return folder, run.finish()
        except Interrupted as error:
            message = f"{error}; go on with: iecl-fast pretrain --resume {folder.path}"
            raise Interrupted(error.signal_number, message) from None


class Pretraining:
    """The state of a run: its parts and how many optimiser steps it has taken.

    Args:
        config: `Config`.
        fabric: launched `lightning_fabric.Fabric`.
        folder: `RunFolder`.
        signals: entered `StopSignals`.
    """

    def __init__(self, config, fabric, folder, signals):
        self.config = config
        self.fabric = fabric
        self.folder = folder
        self.signals = signals
        self.started = time.perf_counter()
        self.seconds_before = 0.0
        self.step = 0

        self.views = build.training_views(config)
        self.evaluation_data = build.evaluation_data(config)
        self.probe_views = build.probe_views(config)
        self.steps = count_steps(config, len(self.views), fabric.world_size)
        self.steps_per_epoch, self.total_steps = self.steps.per_epoch, self.steps.total
        fabric.seed_everything(config.seed, verbose=False)
        self.method = build.method(
            config,
            total_steps=self.total_steps,
            batch_size=self.steps.images_per_pass,
            num_images=len(self.views),
            world_size=fabric.world_size,
        )
        self.optimizer = build.optimizer(config.optimizer, self.method)
        # These two are the same modules and tensors, with precision and DDP around them.
        self.wrapped_method, self.wrapped_optimizer = fabric.setup(self.method, self.optimizer)
        self.untrained = None
        self.query_views = self._query_views()

    def _query_views(self):
        """What the pictures of SAIB's work are made from; None where there is no block, or another rank draws them."""
        saib = self.config.saib
        if saib is None or not self.fabric.is_global_zero:
            return None
        return QueryViews(
            self.views,
            batch_size=self.steps.images_per_pass,
            whole_batch=saib.channels == "batch",
            mean=self.config.views["mean"],
            std=self.config.views["std"],
        )

    def restore_or_begin(self):
        """Continue from the folder's checkpoint; where there is none yet, measure the untrained encoder first."""
        if _on_rank_zero(self.fabric, self.folder.checkpoint.exists):
            self._restore(load_checkpoint(self.folder.checkpoint))
        else:
            self._say("measuring the untrained encoder")
            self.untrained = self._measure()
            seed_rank(self.fabric, self.config.seed)
            self.save()

    def _restore(self, state):
        if state["samples"] != len(self.views):
            raise UsageError(
                f"the run saw {state['samples']} training images, {self.config.data.name} now has {len(self.views)}"
            )
        saib, ranks = self.config.saib, len(state["rng"])
        if saib is not None and saib.channels == "batch" and ranks != self.fabric.world_size:
            raise UsageError(
                f"trainer.devices: {self.fabric.world_size} is not allowed, the block of saib.channels=batch was built "
                f"for a part of the batch on each of {ranks}"
            )
        load_part(self.method, state["method"], self.folder.checkpoint)
        load_part(self.optimizer, state["optimizer"], self.folder.checkpoint)
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        self.step = state["step"]
        self.seconds_before = state["seconds"]
        self.untrained = state["untrained"]
        if self.fabric.global_rank < len(state["rng"]):
            set_rng_state(state["rng"][self.fabric.global_rank], self.fabric.device)
        else:
            seed_rank(self.fabric, self.config.seed, self.step)

    def save(self):
        """Write everything that the rest of the run depends on. The learning rate is a function of the step alone."""
        rng = [get_rng_state(self.fabric.device)]
        if self.fabric.world_size > 1:
            gathered = [None] * self.fabric.world_size
            torch.distributed.all_gather_object(gathered, rng[0])
            rng = gathered
        if self.fabric.is_global_zero:
            state = {
                "config": self.config.to_dict(),
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "precision": self.fabric.strategy.precision.state_dict(),
                "step": self.step,
                "samples": len(self.views),
                "seconds": self._seconds(),
                "untrained": self.untrained,
                "rng": rng,
                "versions": {"torch": str(torch.__version__), "torchvision": torchvision.__version__},
            }
            save_checkpoint(self.folder.checkpoint, state)
        self.fabric.barrier()

    def train(self):
        """Take the steps that are left."""
        log = None
        if self.fabric.is_global_zero:
            log = RunLog(
                self.folder,
                step=self.step,
                total_steps=self.total_steps,
                images_per_step=self.steps.batch_size * self.config.trainer.accumulate,
                progress=self.config.trainer.progress,
            )
        try:
            with self.signals.postponed():
                while self.step < self.total_steps:
                    self._train_epoch(log)
        finally:
            if log is not None:
                log.close()

    def _train_epoch(self, log):
        """The steps from here to the end of the epoch."""
        trainer = self.config.trainer
        epoch, position = divmod(self.step, self.steps_per_epoch)
        self.views.set_epoch(epoch)
        loader = DataLoader(
            self.views,
            batch_sampler=self._batches(epoch, start=position * trainer.accumulate),
            num_workers=self.config.data.workers,
            pin_memory=self.fabric.device.type == "cuda",
            generator=torch.Generator(),  # its own: a resumed run makes one loader more, which is to draw no number
        )
        for batches in grouped(read_batches(loader), trainer.accumulate):
            rate = self._learning_rate()
            losses = self._optimize(batches, rate)
            number = self.step + 1
            logged = number % trainer.log_steps == 0 or number in (1, self.total_steps)
            if logged:
                self._log(log, number, epoch + 1, rate, losses)
            self.method.after_step()
            self._adapt_ring(losses)
            self.step = number
            if log is not None:
                log.advance()
            stop = self._must_stop(logged)
            due = trainer.checkpoint_steps is not None and number % trainer.checkpoint_steps == 0
            if number % self.steps_per_epoch == 0 and self.query_views is not None:
                rows = self.query_views.rows(self.method.saib, self.fabric.device)
                log.write_picture(number, "views", tile(rows))
            if stop or due or number % self.steps_per_epoch == 0:
                self.save()
            if stop:
                signal_number = self.signals.received or signal.SIGTERM
                name = signal.Signals(signal_number).name
                raise Interrupted(signal_number, f"stopped by {name} after step {number} of {self.total_steps}")

    def _optimize(self, batches, rate):
        """One optimiser step over `accumulate` batches. Returns their mean losses, a dict of scalar tensors."""
        means = {}
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for number, (views, _, index) in enumerate(batches, start=1):
            views = [view.to(self.fabric.device, non_blocking=True) for view in views]
            index = index.to(self.fabric.device, non_blocking=True)
            with self.fabric.no_backward_sync(self.wrapped_method, enabled=number < len(batches)):
                losses = self.wrapped_method(views, index)
                self.fabric.backward(sum(losses.values()) / len(batches))
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / len(batches)
        self.wrapped_optimizer.step()
        self.wrapped_optimizer.zero_grad()
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
                f"try a smaller optimizer.lr. The last checkpoint is {self.folder.checkpoint}"
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
        return self.fabric.all_reduce(torch.tensor(float(stop), device=self.fabric.device), reduce_op="sum").item() > 0

    def finish(self):
        """Measure the trained encoder and write result.json and curves.png. Returns the result."""
        self._say("measuring the trained encoder")
        trained = self._measure()
        result = {
            "method": self.config.method["name"],
            "data": self.config.data.name,
            "seed": self.config.seed,
            "epochs": self.config.trainer.epochs,
            "steps": self.step,
            **trained,
            **{f"{name}_untrained": value for name, value in self.untrained.items() if "_top" in name},
            "seconds": self._seconds(),
        }
        if self.fabric.is_global_zero:
            title = f"{self.config.method['name']} on {Path(self.config.data.name).name}"
            draw_curves(self.folder.metrics, self.folder.curves, title)
            if self.query_views is not None:
                draw_views(self.query_views.rows(self.method.saib, self.fabric.device), self.folder.views, title)
            write_json(self.folder.result, result)
        return result

    def _measure(self):
        train, test, num_classes = self.evaluation_data
        if self.fabric.world_size > 1:
            # Each rank's batch norm has statistics of its own; those of rank 0 are what a checkpoint holds.
            for buffer in self.method.backbone.buffers():
                torch.distributed.broadcast(buffer, src=0)
        return measure(
            self.method.backbone,
            train,
            test,
            num_classes,
            PROTOCOLS,
            options=self.config.evaluate,
            fabric=self.fabric,
            workers=self.config.data.workers,
            probe_views=self.probe_views,
        )

    def _batches(self, epoch, start):
        return EpochBatches(
            len(self.views),
            self.config.trainer.batch_size,
            seed=self.config.seed,
            epoch=epoch,
            start=start,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
        )

    def _learning_rate(self):
        return learning_rate(
            self.step,
            peak=self.config.optimizer.lr,
            schedule=self.config.schedule,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
        )

    def _say(self, text):
        if self.fabric.is_global_zero and self.config.trainer.progress:
            print(text, file=sys.stderr, flush=True)

    def _seconds(self):
        return self.seconds_before + time.perf_counter() - self.started


def _on_rank_zero(fabric, action):
    """What `action()` returns on rank 0, given to every rank; its UsageError or OSError is raised on every rank."""
    outcome = None
    if fabric.is_global_zero:
        try:
            outcome = action()
        except (UsageError, OSError) as error:
            outcome = error
    outcome = fabric.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _prepare_folder(folder, config, fabric):
    """Make a new run's folder with its configuration in it; note in either case what the run runs on."""
    if not folder.config.exists():
        folder.make()
        folder.write_config(config.to_dict())
    record_environment(folder.environment, fabric)
