"""The other name of `python -m finetune.split`, beside the data that it splits."""

import runpy

if __name__ == "__main__":
    runpy.run_module("finetune.split", run_name="__main__")
