"""Settings of runs that are small enough for a test."""

SMALL_RUN = [
    "--config",
    "digits_moco",
    "encoder.stem=imagenet",
    "encoder.width=2",
    "trainer.threads=1",
    "method.dim=8",
    "method.num_keys=32",
    "ring.lower=[0,50]",
    "ring.upper=95",
    "data.limit=48",
    "data.workers=0",
    "trainer.batch_size=8",
    "trainer.epochs=3",
    "trainer.log_steps=1",
    "trainer.progress=false",
    "evaluate.linear_iterations=10",
]

# The default recipe, IE-CL with Ring.
SMALL_IECL = [
    "encoder.width=2",
    "method.dim=8",
    "method.hidden_dim=16",
    "method.num_keys=32",
    "method.jacobian_steps=4",
    "data.limit=48",
    "data.workers=0",
    "trainer.batch_size=8",
    "trainer.epochs=3",
    "trainer.log_steps=1",
    "trainer.progress=false",
    "evaluate.linear_iterations=10",
]
