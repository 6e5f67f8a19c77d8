"""What comes from outside, and may have been made to do harm: archives, pickles, YAML, JSON, texts. docs/security.md tells the whole."""
