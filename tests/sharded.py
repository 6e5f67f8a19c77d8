"""The loss with the joint's weight sharded over processes.

    torchrun --nproc_per_node 2 tests/sharded.py fsdp2 | zero3 | ddp

Each process has clips of its own. The averaged gradients of the sharded model equal those of a whole one that has
seen all clips.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from finetune.losses import fused_tdt_loss
from finetune.losses.dropin import in_forward_of

H, V, B, T, U = 16, 30, 3, 12, 4


class Transducer(nn.Module):
    """Encoder and prediction network in one layer each, and the joint's last layer, used outside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = nn.Linear(8, H), nn.Embedding(V + 1, H), nn.Linear(H, V + 6)

    def forward(self, audio_BTF, targets_BU, frames_B, tokens_B):
        enc_BTH = self.encoder(audio_BTF)
        pred_BUH = self.decoder(nn.functional.pad(targets_BU, (1, 0), value=V))

        def loss(enc_BTH, pred_BUH):
            return fused_tdt_loss(enc_BTH, pred_BUH, self.head.weight, self.head.bias, targets_BU, frames_B, tokens_B)

        return in_forward_of(self.head, loss, enc_BTH, pred_BUH)


def clips_of(rank: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    frames, tokens = torch.tensor([T, T - 3, T - 5]), torch.tensor([U, U - 1, 0])
    return [torch.randn(B, T, 8, generator=g), torch.randint(0, V, (B, U), generator=g), frames, tokens]


def whole_gradients(ranks: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model, losses = Transducer(), []
    for rank in range(ranks):
        loss = model(*clips_of(rank))
        (loss / ranks).backward()
        losses.append(float(loss))
    return {name: p.grad for name, p in model.named_parameters()}, losses


def main(how: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    expected, losses = whole_gradients(ranks)
    torch.manual_seed(0)
    model = Transducer()
    if how == "zero3":
        import deepspeed
        from deepspeed.utils import safe_get_full_grad

        deepspeed.init_distributed(dist_backend="gloo")
        config = {
            "train_micro_batch_size_per_gpu": B,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert all(p.numel() == 0 for p in model.parameters()), "nothing is sharded"
        loss = engine(*clips_of(rank))
        engine.backward(loss)
        found = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    else:
        dist.init_process_group("gloo")
        if how == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (ranks,))
            for part in (model.encoder, model.decoder, model.head, model):
                fully_shard(part, mesh=mesh)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        loss = model(*clips_of(rank))
        loss.backward()
        full = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
        found = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in full.items()}
    torch.testing.assert_close(float(loss), losses[rank], rtol=1e-6, atol=0.0)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].float(), gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )
    print(f"{how}: rank {rank} as it should be", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
