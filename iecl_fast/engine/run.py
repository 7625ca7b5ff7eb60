"""A run's parts and state: built from its configuration, measured, written to checkpoints and restored from them."""

import sys
import time
from pathlib import Path

import torch
import torchvision

from iecl_fast import __version__
from iecl_fast.data import Readable
from iecl_fast.engine import build
from iecl_fast.engine.batches import EpochBatches
from iecl_fast.engine.checkpoint import get_rng_state, load_checkpoint, load_part, save_checkpoint, set_rng_state
from iecl_fast.engine.curves import draw_curves
from iecl_fast.engine.errors import UsageError
from iecl_fast.engine.faults import Faults
from iecl_fast.engine.figures import drawable
from iecl_fast.engine.folder import write_json
from iecl_fast.engine.pictures import QueryViews, draw_views
from iecl_fast.engine.plan import count_steps
from iecl_fast.engine.processes import on_rank_zero, seed_rank
from iecl_fast.evaluate.protocols import PROTOCOLS, measure


class Run:
    """The state of a run: its parts and how many optimiser steps it has taken; its beginning, checkpoints and end.

    Args:
        config: `Config`.
        fabric: launched `lightning_fabric.Fabric`.
        folder: `RunFolder`.
    """

    def __init__(self, config, fabric, folder):
        self.config = config
        self.fabric = fabric
        self.folder = folder
        self.started = time.perf_counter()
        self.seconds_before = 0.0
        self.step = 0

        self.views = build.training_views(config)
        self.evaluation_data = build.evaluation_data(config)
        self.probe_views = build.probe_views(config)
        self.steps = count_steps(config, len(self.views), fabric.world_size)
        fabric.seed_everything(config.seed, verbose=False)
        self.method = build.method(
            config,
            total_steps=self.steps.total,
            batch_size=self.steps.images_per_pass,
            num_images=len(self.views),
            world_size=fabric.world_size,
        )
        self.optimizer = build.optimizer(config.optimizer, self.method)
        # One graph, but where ranks exchange rows in the middle of it, whose numbers are known only then.
        compiles = config.trainer.compile
        forward = torch.compile(self.method, fullgraph=fabric.world_size == 1) if compiles else self.method
        # These two are the same modules and tensors, with precision, DDP and compilation around them.
        self.wrapped_method, self.wrapped_optimizer = fabric.setup(forward, self.optimizer)
        self.untrained = None
        self.faults = Faults(fabric, max_unreadable=config.data.max_unreadable, max_skipped=config.trainer.max_skipped)
        self.saved_step = None
        self.query_views = self._query_views()

    def _query_views(self):
        """What the pictures of SAIB's work are made from; None where there is no block, or another rank draws them."""
        saib = self.config.saib
        if saib is None or not self.fabric.is_global_zero:
            return None
        return QueryViews(
            Readable(self.views, self.config.data.max_unreadable),
            batch_size=self.steps.images_per_pass,
            whole_batch=saib.channels == "batch",
            mean=self.config.views["mean"],
            std=self.config.views["std"],
        )

    def restore_or_begin(self):
        """Continue from the folder's checkpoint; where there is none yet, measure the untrained encoder first."""
        if on_rank_zero(self.fabric, self.folder.checkpoint.exists):
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
        if not 0 <= state["step"] <= self.steps.total:
            raise UsageError(
                f"{self.folder.checkpoint} is damaged: it is of step {state['step']} of {self.steps.total}"
            )
        saib, ranks = self.config.saib, len(state["rng"])
        if saib is not None and saib.channels == "batch" and ranks != self.fabric.world_size:
            raise UsageError(
                f"trainer.devices: {self.fabric.world_size} is not allowed, the block of saib.channels=batch was built "
                f"for a part of the batch on each of {ranks}"
            )
        load_part(self.method, state["method"], self.folder.checkpoint)
        load_part(self.optimizer, state["optimizer"], self.folder.checkpoint)
        load_part(self.fabric.strategy.precision, state["precision"], self.folder.checkpoint)
        load_part(self.faults, state["faults"], self.folder.checkpoint)
        self.step = state["step"]
        self.seconds_before = state["seconds"]
        self.untrained = state["untrained"]
        self.saved_step = self.step
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
        method = self.method.state_dict()  # on every rank: a sharded bank is gathered
        if self.fabric.is_global_zero:
            state = {
                "config": self.config.to_dict(),
                "method": method,
                "optimizer": self.optimizer.state_dict(),
                "precision": self.fabric.strategy.precision.state_dict(),
                "step": self.step,
                "samples": len(self.views),
                "seconds": self._seconds(),
                "untrained": self.untrained,
                "faults": self.faults.state_dict(),
                "rng": rng,
                "versions": {
                    "iecl_fast": __version__,
                    "torch": str(torch.__version__),
                    "torchvision": torchvision.__version__,
                },
            }
            save_checkpoint(self.folder.checkpoint, state)
        self.fabric.barrier()
        self.saved_step = self.step

    def how_to_go_on(self):
        """What a user can do when the run has stopped."""
        kept = "" if self.saved_step is None else f"the checkpoint of step {self.saved_step} is kept, "
        return f"{kept}go on with: iecl-fast pretrain --resume {self.folder.path}"

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
            **self.faults.counts(),
            "seconds": self._seconds(),
        }
        if self.fabric.is_global_zero:
            title = f"{self.config.method['name']} on {drawable(Path(self.config.data.name).name)}"
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
            faults=self.faults,
        )

    def batches(self, epoch, start):
        return EpochBatches(
            len(self.views),
            self.config.trainer.batch_size,
            seed=self.config.seed,
            epoch=epoch,
            start=start,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
        )

    def _say(self, text):
        if self.fabric.is_global_zero and self.config.trainer.progress:
            print(text, file=sys.stderr, flush=True)

    def _seconds(self):
        return self.seconds_before + time.perf_counter() - self.started
