"""Search for better settings of a run file: short runs of this pipeline, chosen by Optuna."""
