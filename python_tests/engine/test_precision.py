"""Half precision and compilation in whole runs: what is in the checkpoint, and that they resume exactly."""

import functools
import signal

import pytest
import torch

from iecl_fast.cli import main
from iecl_fast.engine import processes
from iecl_fast.engine.checkpoint import load_checkpoint
from iecl_fast.engine.logging import RunLog, read_metrics
from iecl_fast.ssl.encoders import ResNetBackbone
from test_pretrain import assert_same_run, kill_at, weights


def halted_and_resumed(small_run, tmp_path, monkeypatch, *overrides):
    """A run that was stopped after step 8 and gone on with, and the uninterrupted one."""
    assert main(small_run("whole", *overrides)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", kill_at(8, signal.SIGTERM))
        assert main(small_run("halted", *overrides)) == 143
    assert main(["pretrain", "--resume", str(tmp_path / "halted")]) == 0
    return tmp_path / "halted", tmp_path / "whole"


def scaler_of(folder):
    return load_checkpoint(folder / "checkpoints" / "last.ckpt")["precision"]


@pytest.mark.parametrize(("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_the_arithmetic_is_what_is_asked_for_and_resumes_exactly(
    small_run, whole_run, tmp_path, monkeypatch, precision, dtype
):
    def forward(self, images):
        features = original(self, images)
        seen.add((images.dtype, features.dtype))
        return features

    seen, original = set(), ResNetBackbone.forward
    monkeypatch.setattr(ResNetBackbone, "forward", forward)
    # A scale that changes on the way, every third step, so that the resumed run needs the state it has.
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**10, growth_interval=3)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    halted, whole = halted_and_resumed(small_run, tmp_path, monkeypatch, f"trainer.precision={precision}")
    assert_same_run(halted, whole)
    assert (dtype, dtype) in seen
    assert all(tensor.dtype not in (torch.float16, torch.bfloat16) for tensor in weights(whole).values())
    if precision == "16-mixed":
        assert scaler_of(whole)["scale"] == 2.0 ** (10 + 18 // 3)
        assert scaler_of(whole) == scaler_of(halted)
    else:
        assert scaler_of(whole) == {}
    losses, exact = (read_metrics(folder / "metrics.csv")[0]["loss"] for folder in (whole, whole_run))
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.05)


def test_an_overflow_halves_the_scale_and_leaves_the_weights(small_run, states, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**40))
    overrides = ["trainer.precision=16-mixed", "trainer.checkpoint_steps=1", "trainer.nan_loss=skip"]
    assert main(small_run("run", *overrides, "trainer.epochs=6")) == 0
    assert states[1]["precision"]["scale"] == 2.0**39
    for name, tensor in states[0]["method"].items():
        if name.startswith("encoder") and not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(tensor, states[1]["method"][name]), name
    assert states[36]["precision"]["scale"] < 2.0**30
    assert states[36]["faults"]["skipped_steps"] == 0  # the loss itself is finite
    assert not torch.equal(states[36]["method"]["encoder.head.0.weight"], states[0]["method"]["encoder.head.0.weight"])


def test_another_precision_does_not_resume(small_run, whole_run, capsys):
    assert main(["pretrain", "--resume", str(whole_run), "trainer.precision=16-mixed"]) == 2
    assert "trainer.precision: the run has '32-true'" in capsys.readouterr().err


@pytest.fixture
def compilations(monkeypatch):
    """A list with an entry for each graph that is made; without generating code, of which a ResNet takes a minute."""

    def backend(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    made = []
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return made


def test_a_compiled_run_resumes_exactly_and_is_nearly_the_eager_one(
    small_run, whole_run, tmp_path, monkeypatch, compilations
):
    halted, whole = halted_and_resumed(small_run, tmp_path, monkeypatch, "--compile")
    assert_same_run(halted, whole)
    assert 1 <= len(compilations) <= 6  # at most two attempts in each of three starts, however many steps
    rows, eager = (read_metrics(folder / "metrics.csv") for folder in (whole, whole_run))
    assert [row["loss"] for row in rows[:6]] == pytest.approx([row["loss"] for row in eager[:6]], rel=1e-3)
    torch.testing.assert_close(weights(whole)["queue.keys"], weights(whole_run)["queue.keys"], rtol=0.02, atol=0.02)


def test_a_compiler_that_fails_is_a_message(small_run, tmp_path, monkeypatch, capsys):
    def compile_nothing(graph, inputs):
        raise ValueError("no compiler here")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compile_nothing))
    assert main(small_run("run", "trainer.compile=true")) == 1
    message = capsys.readouterr().err
    assert "torch.compile has failed" in message and "no compiler here" in message
    assert "trainer.compile=false" in message
    assert "Traceback" not in message
    monkeypatch.undo()
    assert main(["pretrain", "--resume", str(tmp_path / "run"), "trainer.compile=false"]) == 0


def test_float16_on_a_cpu_is_float16():
    """Fabric would take bfloat16 in its place."""
    from iecl_fast.engine.config import resolve

    fabric = processes.launch_fabric(resolve({"trainer": {"precision": "16-mixed", "accelerator": "cpu"}}).trainer)
    assert fabric.strategy.precision.precision == "16-mixed"
    assert fabric.strategy.precision.scaler.is_enabled()
