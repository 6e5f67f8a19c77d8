#!/usr/bin/env bash
# Installs bitsandbytes where it is missing and proves with one AdamW8bit step that it works here.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -c 'import bitsandbytes' 2>/dev/null || "$python" -m pip install -c constraints.txt bitsandbytes
"$python" - <<'PY'
import bitsandbytes as bnb
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = torch.nn.Linear(256, 256).to(device)
optimizer = bnb.optim.AdamW8bit(layer.parameters(), lr=1e-3)
before = layer.weight.detach().clone()
layer(torch.ones(4, 256, device=device)).sum().backward()
optimizer.step()
if torch.equal(before, layer.weight):
    raise SystemExit("AdamW8bit stepped and changed nothing")
state = optimizer.state[layer.weight]["state1"]
print(f"bitsandbytes {bnb.__version__}: AdamW8bit works on {device}; its state: {state.dtype}, {state.numel()} bytes")
print("use it with: --strategy adamw_8bit, or training.optimizer: adamw_8bit")
PY
