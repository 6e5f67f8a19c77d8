"""The gate: a written export is decoded by the runtime that will run it, beside its original, before it is kept."""

MAX_LOSS = 0.2
"""Points of WER that the upper end of the interval may reach, for exports that are not exact."""
REPORT = "export.json"
PAGE = "export.html"
