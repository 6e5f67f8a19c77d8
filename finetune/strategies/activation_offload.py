"""Offload the encoder's activations to host memory until the backward pass.

Saved-tensor hooks around the encoder's forward copy what autograd would keep on the GPU to the host as soon as it is
saved, and back when its gradient is computed. With gradient checkpointing that is the input of each checkpointed
layer.
"""

import collections
import contextlib
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

log = logging.getLogger(__name__)

THRESHOLD = 2**20  # bytes; below it a copy costs more in launches than it frees
COPIES_IN_FLIGHT = 4  # storages that stay on the GPU while they are copied to the host
FETCHED_AHEAD = 8  # storages that are copied back before they are needed


@dataclass(eq=False)
class Stored:
    """A storage on the host, one for all tensors that were saved of it."""

    host: torch.Tensor
    position: int
    """Among the storages of its forward pass, in the order in which they were saved."""
    uses: int = 0
    on_device: torch.Tensor | None = None
    copied: torch.cuda.Event | torch.Event | None = None
    """Behind the last copy in either direction."""


@dataclass
class Saved:
    """What autograd keeps in a tensor's place."""

    stored: Stored
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationOffload:
    """`with offload():` around the encoder's forward offloads what autograd saves in it.

    What stays: tensors that share a storage with a parameter or buffer, storages below the threshold, tensors that are
    not on the run's device, and tensor subclasses. A storage is copied once, however many operations save it or views
    of it. (The 16-bit copies of weights that autocast makes are no parameters and are offloaded too.)

    Copies run on a stream of their own, and the host never waits. Out: the copy stream waits for the compute stream;
    the GPU tensor is kept until COPIES_IN_FLIGHT later ones have been queued, and before it is released the compute
    stream waits for its copy, so that the allocator, which reuses memory in the order of the compute stream, cannot
    hand it out too early. The last few are used from the GPU. Back: memory is taken on the compute stream, in whose
    order the copy stream fills it; the FETCHED_AHEAD storages that were saved before it are fetched at the same time.
    Autograd runs backward on the stream of the forward, so both sides mean the same compute stream.

    Without a GPU everything is copied within the host memory, which gains nothing and gives the same results.

    Args:
        module: the encoder, whose parameters and buffers are told from activations.
        threshold: bytes; smaller storages stay. None: THRESHOLD.
    """

    def __init__(self, module: torch.nn.Module, threshold: int | None = None):
        self.module = module
        self.threshold = THRESHOLD if threshold is None else threshold
        self.stream: torch.cuda.Stream | None = None
        self.bytes = 0
        """Bytes that went to the host in the last forward."""
        self.reported = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        device = next(self.module.parameters()).device
        if device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)
        # Looked up each time: engines and .to() put parameters into other storages.
        tensors = [*self.module.parameters(), *self.module.buffers()]
        own = {t.untyped_storage()._cdata for t in tensors}
        stream = self.stream if device.type == "cuda" else None
        forward = OffloadedForward(device, stream, own, self.threshold)
        try:
            with torch.autograd.graph.saved_tensors_hooks(forward.pack, forward.unpack):
                yield
            if not self.reported:
                told = (
                    "activation offload: %.1f MiB of the encoder's activations of the first batch wait in host memory"
                )
                log.info(told, forward.bytes / 2**20)
                if device.type != "cuda":
                    log.warning("activation offload gains nothing here: without a GPU they are in host memory anyway")
            self.reported = True
        finally:
            self.bytes = forward.bytes
            # The graph keeps `forward` until its end; each storage on the host is freed when its gradients are there.
            forward.known.clear()


class OffloadedForward:
    """The saved-tensor hooks of one forward pass."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None, own: set[int], threshold: int):
        self.device, self.stream, self.own, self.threshold = device, stream, own, threshold
        self.known: dict[tuple[StorageWeakRef, int], Stored] = {}
        self.order: list[weakref.ref[Stored]] = []
        self.in_flight: collections.deque[weakref.ref[Stored]] = collections.deque()
        self.bytes = 0

    # ---- out -------------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        if self._stays(tensor):
            return tensor
        storage = tensor.untyped_storage()
        # The weak reference keeps the storage's identity from being given to another one once it is freed.
        key = StorageWeakRef(storage), tensor._version
        if key not in self.known:
            self.known[key] = self._send(storage)
        stored = self.known[key]
        stored.uses += 1
        return Saved(stored, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _stays(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.device != self.device
            or tensor.untyped_storage().nbytes() < self.threshold
            or tensor.untyped_storage()._cdata in self.own
        )

    def _send(self, storage: torch.UntypedStorage) -> Stored:
        content = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.bytes += storage.nbytes()
        if self.stream is None:
            stored = Stored(content.clone(), len(self.order))
        else:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            stored = Stored(host, len(self.order), on_device=content)
            self._copy(host, content, stored, self.stream)
            self.in_flight.append(weakref.ref(stored))
            oldest = self.in_flight.popleft()() if len(self.in_flight) > COPIES_IN_FLIGHT else None
            if oldest is not None:
                self._wait_for_copy(oldest)
                oldest.on_device = None
        self.order.append(weakref.ref(stored))
        return stored

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stored: Stored, stream: torch.cuda.Stream) -> None:
        """Queue a copy behind what the compute stream has been given so far."""
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            stored.copied = stream.record_event()

    def _wait_for_copy(self, stored: Stored) -> None:
        """Let the compute stream wait for the last copy of a storage."""
        if stored.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(stored.copied)

    # ---- back ------------------------------------------------------------------------------------------------------

    def unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        content = saved.stored.host if self.stream is None else self._back(saved.stored, self.stream)
        return torch.empty(0, dtype=saved.dtype, device=self.device).set_(
            content.untyped_storage(), saved.offset, saved.size, saved.stride
        )

    def _back(self, stored: Stored, stream: torch.cuda.Stream) -> torch.Tensor:
        """Return the storage's content on the GPU, and start fetching those that were saved before it."""
        content = self._fetch(stored, stream)
        first = max(stored.position - FETCHED_AHEAD, 0)
        for reference in reversed(self.order[first : stored.position]):
            earlier = reference()
            if earlier is not None and earlier.uses > 0:
                self._fetch(earlier, stream)
        self._wait_for_copy(stored)
        stored.uses -= 1
        if stored.uses <= 0:
            stored.on_device = None
        return content

    def _fetch(self, stored: Stored, stream: torch.cuda.Stream) -> torch.Tensor:
        if stored.on_device is None:
            stored.on_device = torch.empty(stored.host.numel(), dtype=torch.uint8, device=self.device)
            # Where a backward pass ends early, nothing else waits for the copy.
            stored.on_device.record_stream(stream)
            self._copy(stored.on_device, stored.host, stored, stream)
        return stored.on_device
