"""Loading Parakeet checkpoints and the module that turns a batch into losses."""
