"""Commands and checks around a training. They import the core and are never imported by it."""
