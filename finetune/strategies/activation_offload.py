"""Activations of the encoder that wait for the backward pass in host memory.

Saved-tensor hooks stand around the encoder's forward: what autograd would keep on the GPU is copied to the host as soon as it
is saved and comes back when its gradient is computed. With gradient checkpointing that is the input of each checkpointed layer.
"""

import collections
import contextlib
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

log = logging.getLogger(__name__)

THRESHOLD = 2**20  # bytes; below it a copy costs more in launches than it frees
COPIES_IN_FLIGHT = 4  # storages that stay on the GPU while they are copied away
FETCHED_AHEAD = 8  # storages that are on their way back before they are needed


@dataclass(eq=False)
class Stored:
    """A storage that waits on the host, one for all tensors that were saved of it."""

    host: torch.Tensor
    device: torch.device
    place: int
    order: list[Any]
    """Weak references to all storages of this forward pass, in the order in which they were saved."""
    uses: int = 0
    on_device: torch.Tensor | None = None
    copied: Any = None
    """CUDA event behind the last copy in either direction."""


@dataclass
class Saved:
    """What autograd keeps in a tensor's place."""

    stored: Stored
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class ForwardPass:
    """What is known during one forward of the encoder."""

    device: torch.device
    own: set[int]
    known: dict[tuple[StorageWeakRef, int], Stored] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)
    bytes: int = 0


class ActivationOffload:
    """`with offload():` around the encoder's forward sends what autograd saves in it to the host.

    What stays: tensors that share a storage with a parameter or buffer, storages below the threshold, tensors that are not on
    the run's device, and tensor subclasses. A storage is copied once, however many operations save it or views of it. (The
    16-bit copies of weights that autocast makes are no parameters and travel too.)

    Synchronisation on a GPU. Copies run on a stream of their own. Out: that stream waits for the compute stream, so that the
    values are there; the GPU tensor is kept until COPIES_IN_FLIGHT later ones are on their way, and before it is let go the
    compute stream waits for its copy, so that the allocator, which reuses memory in the order of the compute stream, cannot
    hand it out too early. The host never waits. The last few are still on the GPU when the backward pass begins and are used
    from there. Back: memory is taken on the compute stream; the copy stream waits for the kernels that used it before, and
    the compute stream waits for the copy before the tensor is used. The FETCHED_AHEAD storages that were saved before it are
    fetched at the same time. Autograd runs backward on the stream of the forward, so both sides mean the same compute stream.
    That nothing overwrites a saved tensor before its gradient is computed is autograd's own rule.

    On a machine without a GPU everything is copied within the host memory, which gains nothing and gives the same results.

    Args:
        module: the encoder, whose parameters and buffers are told from activations.
        threshold: bytes; smaller storages stay. None: THRESHOLD.
    """

    def __init__(self, module: torch.nn.Module, threshold: int | None = None):
        self.module = module
        self.threshold = THRESHOLD if threshold is None else threshold
        self.stream: Any = None
        self.in_flight: collections.deque[Any] = collections.deque()
        self.now: ForwardPass | None = None
        self.bytes = 0
        """Bytes that went to the host in the last forward."""
        self.said = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        device = next(self.module.parameters()).device
        if device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)
        # Asked each time: engines and .to() put parameters into other storages.
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.now = ForwardPass(device, {t.untyped_storage()._cdata for t in tensors})
        self.in_flight.clear()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._say()
        finally:
            self.bytes, self.now = self.now.bytes, None

    def _say(self) -> None:
        if self.said:
            return
        self.said = True
        log.info(
            "activation offload: %.1f MiB of the encoder's activations of the first batch wait in host memory, in %d storages of %d "
            "bytes and more",
            self.now.bytes / 2**20,
            len(self.now.order),
            self.threshold,
        )
        if self.now.device.type != "cuda":
            log.warning(
                "activation offload gains nothing here: without a GPU the activations are in host memory anyway"
            )

    # ---- out -------------------------------------------------------------------------------------------------------

    def _stays(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.device != self.now.device
            or tensor.untyped_storage().nbytes() < self.threshold
            or tensor.untyped_storage()._cdata in self.now.own
        )

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._stays(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # The weak reference keeps the storage's identity from being given to another one once it is freed.
        key = StorageWeakRef(storage), tensor._version
        if key not in self.now.known:
            self.now.known[key] = self._send(storage)
        stored = self.now.known[key]
        stored.uses += 1
        return Saved(stored, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _send(self, storage: torch.UntypedStorage) -> Stored:
        now = self.now
        content = torch.empty(0, dtype=torch.uint8, device=now.device).set_(storage)
        now.bytes += storage.nbytes()
        if now.device.type != "cuda":
            stored = Stored(content.clone(), now.device, len(now.order), now.order)
        else:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            stored = Stored(host, now.device, len(now.order), now.order, on_device=content)
            self._copy(host, content, stored)
            self.in_flight.append(weakref.ref(stored))
            if len(self.in_flight) > COPIES_IN_FLIGHT:
                oldest = self.in_flight.popleft()()
                if oldest is not None:
                    self._let_go(oldest)
        now.order.append(weakref.ref(stored))
        return stored

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stored: Stored) -> None:
        """Queues a copy on the copy stream, behind what the compute stream has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(stored.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            stored.copied = self.stream.record_event()

    def _let_go(self, stored: Stored) -> None:
        """Frees the GPU memory, for use behind the copy."""
        torch.cuda.current_stream(stored.device).wait_event(stored.copied)
        stored.on_device = None

    # ---- back ------------------------------------------------------------------------------------------------------

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        stored = saved.stored
        content = stored.host if stored.device.type != "cuda" else self._back(stored)
        return torch.empty(0, dtype=saved.dtype, device=stored.device).set_(
            content.untyped_storage(), saved.offset, saved.size, saved.stride
        )

    def _back(self, stored: Stored) -> torch.Tensor:
        """The storage's content on the GPU; those that were saved before it are sent on their way."""
        self._fetch(stored)
        first = max(stored.place - FETCHED_AHEAD, 0)
        for reference in reversed(stored.order[first : stored.place]):
            earlier = reference()
            if earlier is not None and earlier.uses > 0:
                self._fetch(earlier)
        torch.cuda.current_stream(stored.device).wait_event(stored.copied)
        content = stored.on_device
        stored.uses -= 1
        if stored.uses <= 0:
            stored.on_device = None
        return content

    def _fetch(self, stored: Stored) -> None:
        if stored.on_device is None:
            stored.on_device = torch.empty(stored.host.numel(), dtype=torch.uint8, device=stored.device)
            # Where a backward pass ends early, nothing else waits for the copy.
            stored.on_device.record_stream(self.stream)
            self._copy(stored.on_device, stored.host, stored)
