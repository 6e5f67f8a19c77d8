"""Read a data set to its end before anything is trained on it: `python -m finetune.check --data D`."""

import sys

from finetune.tools.data_check.check import main

if __name__ == "__main__":
    sys.exit(main())
