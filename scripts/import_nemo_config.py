"""The same as `python -m finetune.import_nemo`, under its earlier name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.import_nemo import main

if __name__ == "__main__":
    sys.exit(main())
