"""The training loop, its schedule, its checkpoints and the files that it leaves."""
