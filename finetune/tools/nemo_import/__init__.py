"""Configurations of NeMo and of other scripts, as run files."""
