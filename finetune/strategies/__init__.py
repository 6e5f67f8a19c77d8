"""Memory strategies: what NAME.yaml switches on, and which of them exclude each other."""
