"""The earlier name of `python -m finetune.check`, kept for scripts that use it."""

import runpy

if __name__ == "__main__":
    runpy.run_module("finetune.check", run_name="__main__")
