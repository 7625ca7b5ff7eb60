"""The pretraining loop: configuration, checkpoints, logs."""
