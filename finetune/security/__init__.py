"""Files and texts from outside, which may be made to do harm: archives, pickles, YAML, JSON. See docs/security.md."""
